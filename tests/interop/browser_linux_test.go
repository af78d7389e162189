// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

var pictures = flag.String("pictures", "", "write the pictures of docs/console.md to this directory")

// axe checks a page for accessibility; it is pinned so that new rules do not fail old pages.
const axe = "axe-core@4.11.0"

// maxPages limits the crawl; more pages of a kind show nothing new.
const maxPages = 60

// hostile is text that must appear as text in every place to which an action can write it.
const hostile = `<script>document.title="taken"</script><img src="http://192.0.2.1/x"><b>&amp;` + "\x1b[31mred\x1b[0m"

// TestConsoleInABrowser opens every page that links reach, in both themes, in Chromium. No page may log an error, ask
// another origin for anything, run what an action wrote, or break a rule of accessibility. Screenshots go to
// bin/screenshots.
func TestConsoleInABrowser(t *testing.T) {
	b := startBrowser(t)
	web := must.Get(loopback.Address())(t)
	addr := listen(t, "--web", web, "--gate-reports", gateReports(t))
	store := dialAt(t, addr, "")
	var last string
	for _, script := range []string{
		"cp in/name out/copy",
		": > out/copy",
		"printf '%s' '" + hostile + "' | tee out/copy >&2; exit 3",
		"curl -sS http://example.com/tool.tar.gz -o out/copy",
	} {
		d := action(t, store, script, time.Minute)
		must.Get(execute(t.Context(), addr, "", d))(t)
		last = fmt.Sprintf("/a/%s-%d", d.Hash, d.SizeBytes)
	}
	origin := "http://" + web
	var axeText string
	t.Run("axe", func(t *testing.T) { axeText = axeSource(t) })

	queue, opened := []string{"/"}, map[string]bool{}
	for len(queue) > 0 && len(opened) < maxPages {
		path := queue[0]
		if queue = queue[1:]; opened[path] {
			continue
		}
		opened[path] = true
		t.Run(strings.ReplaceAll(path, "/", "."), func(t *testing.T) {
			for _, theme := range []string{"light", "dark"} {
				links := b.open(t, origin, path, theme)
				b.screenshot(t, path, theme)
				if axeText != "" {
					b.wantAccessible(t, axeText, theme)
				}
				queue = append(queue, links...)
			}
		})
	}
	if *pictures != "" {
		for path, name := range map[string]string{"/actions": "actions", last: "action", last + "/sandbox": "sandbox"} {
			b.open(t, origin, path, "light")
			var picture []byte
			must.Succeed(t, chromedp.Run(b.ctx, chromedp.CaptureScreenshot(&picture)))
			must.Succeed(t, os.WriteFile(filepath.Join(*pictures, "console-"+name+".png"), picture, 0o644))
		}
	}
	kinds := map[string]bool{}
	for path := range opened {
		kinds[regexp.MustCompile(`[0-9a-f]{64}-[0-9]+|[0-9a-f]{40}`).ReplaceAllString(strings.Split(path, "?")[0], "DIGEST")] = true
	}
	for _, kind := range []string{
		"/", "/actions", "/workers", "/cache", "/check", "/audit", "/diff", "/cas/DIGEST", "/gate", "/gate/DIGEST",
		"/a/DIGEST", "/a/DIGEST/inputs", "/a/DIGEST/sandbox", "/a/DIGEST/repro",
	} {
		expect.That(t, kinds[kind], "no link leads to a page like %s; links lead to %v", kind, slices.Sorted(maps.Keys(kinds)))
	}
}

// gateReports returns a directory with a report of the gate whose step chose hostile texts.
func gateReports(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	at := filepath.Join(dir, strings.Repeat("0f", 20))
	must.Succeed(t, os.Mkdir(at, 0o755))
	text := must.Get(json.Marshal(map[string]any{
		"format": "cloister-gate-report v1", "revision": hostile, "verdict": "violation", "mode": "enforce", "exit_code": 4,
		"steps": []any{map[string]any{
			"id": "unit-tests", "command": []string{"make", hostile}, "verdict": "violation", "message": hostile,
			"violations": []any{map[string]any{"kind": "connect", "subject": hostile, "process": hostile, "count": 2, "text": hostile}},
			"exceptions": []any{map[string]any{"host": "schema.example.com", "port": 443, "owner": "platform", "reason": hostile, "expires": "2027-03-31"}},
		}},
	}))(t)
	must.Succeed(t, os.WriteFile(filepath.Join(at, "report.json"), text, 0o644))
	return dir
}

// TestOverviewFollowsActions: the overview shows an action that began after the page was opened, without a reload.
func TestOverviewFollowsActions(t *testing.T) {
	b := startBrowser(t)
	web := must.Get(loopback.Address())(t)
	addr := listen(t, "--web", web)
	b.open(t, "http://"+web, "/", "light")
	d := action(t, dialAt(t, addr, ""), "sleep 600", 20*time.Minute)
	running := request(t.Context(), addr, d)
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.WaitVisible(`#live a[href^="/a/"]`)))
	must.Succeed(t, exec.CommandContext(t.Context(), must.Get(cloister())(t), "action", "cancel", d.Hash, "--server", "grpc://"+addr).Run())
	<-running.ended
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.WaitNotPresent(`#live a[href^="/a/"]`)))
}

// TestBuildPageFollowsBazel: the page of a build shows its targets, tests and output as Bazel publishes them, without a
// reload, until the build ends.
func TestBuildPageFollowsBazel(t *testing.T) {
	bazel := bazelFor(t)
	b := startBrowser(t)
	web := must.Get(loopback.Address())(t)
	bazel.Endpoint = listen(t, "--web", web)
	barrier := newBarrier(t)
	for name, text := range map[string]string{
		"BUILD.bazel": `load("@rules_shell//shell:sh_test.bzl", "sh_test")
genrule(name = "made", outs = ["made.txt"], cmd = "echo made > $@")
[sh_test(name = n, size = "small", srcs = [n + ".sh"], data = [":made"]) for n in ["first", "last"]]
`,
		"first.sh": "#!/bin/sh\n",
		"last.sh":  "#!/bin/sh\n" + barrier.script("last") + "\necho the reason; exit 1\n",
	} {
		path := filepath.Join(bazel.Workspace, "examples/live", name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o755))
	}
	const id = "5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f"
	type outcome struct {
		build *bazelrun.Build
		err   error
	}
	ended := make(chan outcome, 1)
	go func() { // local tests can wait for the barrier
		build, err := bazel.Run(t.Context(), "test", "--bes_backend=grpc://"+bazel.Endpoint, "--bes_results_url=http://"+web+"/i/",
			"--invocation_id="+id, "--strategy=TestRunner=local", "--test_timeout=3600", "//examples/live/...")
		ended <- outcome{build, err}
	}()
	must.Hold(t, "Bazel publishes the build", func() bool { return invocationStatus(t, bazel.Endpoint, id) == "running" })
	b.open(t, "http://"+web, "/i/"+id, "light")
	shows := func(text string) {
		t.Helper()
		must.Succeed(t, chromedp.Run(b.ctx, chromedp.Poll(
			fmt.Sprintf(`document.getElementById("live").textContent.includes(%q)`, text), nil, chromedp.WithPollingTimeout(0))))
	}
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.Evaluate(`window.opened = true`, nil))) // a reload would lose it
	barrier.arrived(t, 1)
	shows("//examples/live:last")
	shows("//examples/live:firstpassed") // cells of the table of tests
	b.screenshot(t, "/i/running", "light")
	expect.Equal(t, invocationStatus(t, bazel.Endpoint, id), "running", "status of the build")
	barrier.open(t)
	shows("failed (TESTS_FAILED)")
	shows("//examples/live:lastfailed")
	shows("Executed 2 out of 2 tests")
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.WaitReady(`#live[data-over]`)))
	var kept bool
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.Evaluate(`window.opened === true`, &kept)))
	expect.That(t, kept, "the page was loaded again")
	b.screenshot(t, "/i/ended", "dark")
	o := <-ended
	must.Succeed(t, o.err)
	expect.That(t, o.build.ExitCode == 3 && strings.Contains(o.build.Output, "http://"+web+"/i/"+id), "got exit code %d and %s", o.build.ExitCode, o.build.Output)
	expect.Equal(t, invocationStatus(t, bazel.Endpoint, id), "failed", "status of the build")
	b.open(t, "http://"+web, "/", "light")
	var rows string
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.Text("main", &rows)))
	expect.Text(t, rows, id, "the list of builds")
	b.mu.Lock()
	defer b.mu.Unlock()
	expect.Slices(t, b.problems, nil, "problems of the page")
}

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestLargeDataInABrowser opens a build of 10,000 actions, a tree of 200,000 files and a blob of 1 GiB. It logs how
// long that takes.
func TestLargeDataInABrowser(t *testing.T) {
	b := startBrowser(t)
	web := must.Get(loopback.Address())(t)
	addr := listen(t, "--web", web, "--max-size", "8GiB")
	store := dialAt(t, addr, "")
	put := func(m proto.Message) *repb.Digest {
		t.Helper()
		return must.Get(cas.PutProto(t.Context(), store, cas.SHA256, m))(t).Proto()
	}
	file := must.Get(cas.PutBytes(t.Context(), store, cas.SHA256, []byte("four")))(t).Proto()
	root := &repb.Directory{}
	for d := range 200 {
		dir := &repb.Directory{}
		for n := range 1000 {
			dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprintf("file-%d-%04d", d, n), Digest: file})
		}
		root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("dir-%03d", d), Digest: put(dir)})
	}
	tree := put(&repb.Action{CommandDigest: put(&repb.Command{Arguments: []string{"true"}}), InputRootDigest: put(root)})
	const gib, id = 1 << 30, "5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f"
	h := cas.SHA256.New(gib)
	must.Get(io.CopyN(h, zeros{}, gib))(t)
	blob := cas.SHA256.Digest(h, gib)
	must.Succeed(t, store.Put(t.Context(), blob, io.LimitReader(zeros{}, gib)))
	md := must.Get(proto.Marshal(&repb.RequestMetadata{ActionMnemonic: "Some", ToolInvocationId: id}))(t)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", string(md))
	results := repb.NewActionCacheClient(grpctest.Dial(t, addr))
	for n := range 10_000 {
		_, err := results.GetActionResult(ctx, &repb.GetActionResultRequest{ActionDigest: cas.SHA256.Sum([]byte(fmt.Sprint(n))).Proto()})
		must.Be(t, status.Code(err) == codes.NotFound, "lookup: %v", err)
	}
	for path, want := range map[string]string{
		"/i/" + id:                  "Cache misses",
		"/actions?invocation=" + id: "absent",
		fmt.Sprintf("/a/%s-%d/inputs", tree.Hash, tree.SizeBytes):              "200000 files",
		fmt.Sprintf("/a/%s-%d/inputs?path=dir-199", tree.Hash, tree.SizeBytes): "file-199-0999",
		fmt.Sprintf("/cas/%s-%d", blob.Hash(), gib):                            "of 1.0 GiB",
		fmt.Sprintf("/cas/%s-%d?as=text", blob.Hash(), gib):                    "of 1.0 GiB",
	} {
		begun := time.Now()
		b.open(t, "http://"+web, path, "light")
		t.Logf("%s opens in %v", path, time.Since(begun))
		var text string
		must.Succeed(t, chromedp.Run(b.ctx, chromedp.TextContent("main", &text)))
		expect.Text(t, text, want, path)
		expect.That(t, len(text) < 1<<20, "%s has a text of %d bytes", path, len(text))
		b.screenshot(t, path, "light")
	}
}

// invocationStatus returns the status of a build as cloister invocation ls prints it.
func invocationStatus(t *testing.T, addr, id string) string {
	t.Helper()
	out := must.Get(exec.CommandContext(t.Context(), must.Get(cloister())(t), "invocation", "ls", "--json", "--server", "grpc://"+addr).Output())(t)
	var all []struct{ Invocation, Status string }
	must.Succeed(t, json.Unmarshal(out, &all))
	for _, i := range all {
		if i.Invocation == id {
			return i.Status
		}
	}
	return ""
}

// TestConsoleWithTheKeyboard: the first stop of the Tab key skips the navigation, and the slash key searches.
func TestConsoleWithTheKeyboard(t *testing.T) {
	b := startBrowser(t)
	web := must.Get(loopback.Address())(t)
	listen(t, "--web", web)
	b.open(t, "http://"+web, "/", "light")
	for _, c := range []struct{ key, want string }{
		{"\t", "A skip"},
		{"/", "INPUT "},
	} {
		var got string
		must.Succeed(t, chromedp.Run(b.ctx, chromedp.KeyEvent(c.key),
			chromedp.Evaluate(`document.activeElement.tagName + " " + document.activeElement.className`, &got)))
		expect.Equal(t, got, c.want, "focus after the key %q", c.key)
	}
}

// A browser is a tab of a Chromium. Events of the tab append to problems.
type browser struct {
	ctx context.Context

	mu       sync.Mutex
	origin   string   // guarded by mu; of the current page
	problems []string // guarded by mu
}

// startBrowser starts Chromium without access to other hosts' names. It ends with the test.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		sandboxtest.Unavailable(t, "browser", err)
	}
	dir := must.Get(os.MkdirTemp("", "cloister-chromium-"))(t)
	t.Cleanup(func() { // the processes of Chromium outlive the first
		must.Hold(t, "removed the profile", func() bool { return os.RemoveAll(dir) == nil })
	})
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(program), chromedp.NoSandbox,
		chromedp.UserDataDir(dir), chromedp.WindowSize(1280, 900), chromedp.WSURLReadTimeout(2*time.Minute))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	tab, cancel := chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	tab, cancel = context.WithTimeout(tab, 10*time.Minute)
	t.Cleanup(cancel)
	b := &browser{ctx: tab}
	chromedp.ListenTarget(tab, b.event)
	must.Succeed(t, chromedp.Run(tab, network.Enable(), runtime.Enable(), cdplog.Enable()))
	return b
}

// event records what a page must not do.
func (b *browser) event(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	problem := func(format string, args ...any) { b.problems = append(b.problems, fmt.Sprintf(format, args...)) }
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		if u := e.Request.URL; !strings.HasPrefix(u, b.origin+"/") && !strings.HasPrefix(u, "data:,") && u != "about:blank" {
			problem("a request to another origin: %s", u)
		}
	case *network.EventResponseReceived:
		if e.Response.Status >= 400 {
			problem("%s is answered with %d", e.Response.URL, e.Response.Status)
		}
	case *runtime.EventExceptionThrown:
		problem("an exception: %s", e.ExceptionDetails.Error())
	case *runtime.EventConsoleAPICalled:
		problem("a line in the console: %s %v", e.Type, e.Args)
	case *cdplog.EventEntryAdded:
		problem("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
	}
}

// open opens a page and returns the paths of its links to other pages.
func (b *browser) open(t *testing.T, origin, path, theme string) (links []string) {
	t.Helper()
	b.mu.Lock()
	b.origin, b.problems = origin, nil
	b.mu.Unlock()
	var title string
	must.Succeed(t, chromedp.Run(b.ctx,
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: theme}}),
		chromedp.Navigate(origin+path),
		chromedp.WaitVisible("main h1"),
		chromedp.Title(&title),
		// Downloads and data are no pages.
		chromedp.Evaluate(`Array.from(document.links, (a) => a.origin === location.origin ? a.pathname + a.search : a.href)`, &links),
	))
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, problem := range b.problems {
		t.Errorf("%s, theme %s: %s", path, theme, problem)
	}
	expect.Text(t, title, "cloister", "title of %s", path)
	return slices.DeleteFunc(links, func(link string) bool {
		u, err := url.Parse(link)
		expect.That(t, err == nil && u.Host == "", "%s links to %s", path, link)
		guess := strings.HasPrefix(path, "/cas/") && u.Query().Has("as") // shows a blob as what it may not be
		return err != nil || guess || strings.HasSuffix(u.Path, ".json") || strings.HasSuffix(u.Path, "/raw")
	})
}

var unsafe = regexp.MustCompile(`[^a-z0-9]+`)

// screenshot keeps a picture of the whole current page in bin/screenshots.
func (b *browser) screenshot(t *testing.T, path, theme string) {
	t.Helper()
	var picture []byte
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.FullScreenshot(&picture, 100)))
	dir := filepath.Join("..", "..", "bin", "screenshots")
	must.Succeed(t, os.MkdirAll(dir, 0o755))
	name := strings.Trim(unsafe.ReplaceAllString(regexp.MustCompile(`([0-9a-f]{8})[0-9a-f]{56}`).ReplaceAllString(path, "$1"), "-"), "-")
	if name == "" {
		name = "overview"
	}
	must.Succeed(t, os.WriteFile(filepath.Join(dir, name[:min(len(name), 80)]+"-"+theme+".png"), picture, 0o644))
}

// wantAccessible applies the rules of axe to the current page.
func (b *browser) wantAccessible(t *testing.T, source, theme string) {
	t.Helper()
	var report string
	must.Succeed(t, chromedp.Run(b.ctx, chromedp.Evaluate(source+";0", nil), chromedp.Evaluate(
		`axe.run().then((r) => JSON.stringify(r.violations.map((v) => v.id + ": " + v.help + ": " +
			v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200) + " " + n.failureSummary).join(" | "))))`, &report,
		func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) })))
	var violations []string
	must.Succeed(t, json.Unmarshal([]byte(report), &violations))
	for _, v := range violations {
		t.Errorf("theme %s: %s", theme, v)
	}
}

// axeSource returns axe as published for Node.
func axeSource(t *testing.T) string {
	t.Helper()
	cache := filepath.Join(must.Get(os.UserCacheDir())(t), "cloister-interop", strings.ReplaceAll(axe, "@", "-"))
	name := filepath.Join(cache, "node_modules", "axe-core", "axe.min.js")
	if text, err := os.ReadFile(name); err == nil {
		return string(text)
	}
	if _, err := exec.LookPath("npm"); err != nil {
		sandboxtest.Unavailable(t, "node", err)
	}
	must.Succeed(t, os.MkdirAll(cache, 0o755))
	if out, err := exec.CommandContext(t.Context(), "npm", "install", "--ignore-scripts", "--no-save", "--prefix", cache, axe).CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "node", fmt.Sprintf("npm install %s: %v\n%s", axe, err, out))
	}
	return string(must.Get(os.ReadFile(name))(t))
}
