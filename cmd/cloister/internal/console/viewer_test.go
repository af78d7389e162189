// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/auditlog"
	"github.com/cloister-build/cloister/cmd/cloister/internal/console"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// A fixture is a console over a disk store, a history and an audit log.
type fixture struct {
	*cas.Instance
	t       *testing.T
	url     string
	token   string
	history *history.Log
	audit   *audit.Log
	reports string // of the gate
}

// token is that of the only caller of fixtures with access rules.
const token = "secret"

// open serves a console. rights are those of the caller in access rules; without them everybody may do everything.
func open(t *testing.T, rights string) *fixture {
	dir := t.TempDir()
	cache := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 8 << 30}))(t)
	t.Cleanup(func() { cache.Close() })
	f := &fixture{t: t, Instance: must.Get(cache.Instance(""))(t)}
	f.history = must.Get(history.Open(history.Config{Dir: filepath.Join(dir, "history"), MaxBytes: 1 << 20}))(t)
	t.Cleanup(func() { f.history.Close() })
	audits := filepath.Join(dir, "audit")
	f.audit = must.Get(audit.Open(audit.Config{Dir: audits}))(t)
	t.Cleanup(func() { f.audit.Close() })
	log := slog.New(slog.DiscardHandler)
	loop := console.NewLoopback()
	options := append(casserver.ServerOptions(log), casserver.Codec(), loop.Credentials())
	if rights != "" {
		sum := sha256.Sum256([]byte(token))
		text := fmt.Sprintf("version: 1\ncallers: [{name: c, token_sha256: %s, rights: %s}]", hex.EncodeToString(sum[:]), rights)
		options = append(options, must.Get(access.Parse("auth.yaml", []byte(text)))(t).Options()...)
	}
	server := grpc.NewServer(options...)
	stop := must.Get(casserver.Register(server, casserver.Config{Instances: cache.Instance}))(t)
	must.Succeed(t, history.Register(server, f.history, cache.Instance, nil))
	auditlog.Register(server, audits, log)
	control := must.Get(diskctl.Serve(filepath.Join(dir, "store"), cache, nil))(t)
	t.Cleanup(func() { control.Close() })
	control.Register(server)
	f.reports = filepath.Join(dir, "reports")
	must.Succeed(t, os.Mkdir(f.reports, 0o755))
	served := make(chan error, 1)
	go func() { served <- server.Serve(loop) }()
	t.Cleanup(func() { server.Stop(); stop(); <-served })
	web := httptest.NewServer(console.New(console.Config{
		Address: "grpc://127.0.0.1:1", Options: loop.Options, GateReports: f.reports, Log: log,
	}))
	t.Cleanup(web.Close)
	f.url = web.URL
	return f
}

func (f *fixture) request(path string, header ...string) *http.Response {
	f.t.Helper()
	r := must.Get(http.NewRequestWithContext(f.t.Context(), http.MethodGet, f.url+path, nil))(f.t)
	if f.token != "" {
		r.SetBasicAuth("", f.token)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return must.Get(client.Do(r))(f.t)
}

// get returns status and body.
func (f *fixture) get(path string, header ...string) (int, string) {
	f.t.Helper()
	r := f.request(path, header...)
	defer r.Body.Close()
	return r.StatusCode, string(must.Get(io.ReadAll(r.Body))(f.t))
}

// page returns the body of a page, which must be OK.
func (f *fixture) page(path string) string {
	f.t.Helper()
	code, body := f.get(path)
	must.Be(f.t, code == http.StatusOK, "%s: %d %s", path, code, body)
	return body
}

func (f *fixture) put(data string) cas.Digest {
	f.t.Helper()
	return must.Get(cas.PutBytes(f.t.Context(), f.Store, cas.SHA256, []byte(data)))(f.t)
}

func (f *fixture) putMessage(m proto.Message) cas.Digest {
	f.t.Helper()
	return must.Get(cas.PutProto(f.t.Context(), f.Store, cas.SHA256, m))(f.t)
}

// action stores an action with an input root.
func (f *fixture) action(root cas.Digest, args ...string) cas.Digest {
	command := f.putMessage(&repb.Command{Arguments: args})
	return f.putMessage(&repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()})
}

func at(prefix string, d cas.Digest) string { return prefix + strings.Replace(d.String(), "/", "-", 1) }

// hostile is markup, an attribute's end, terminal and direction control, and a byte that is not UTF-8.
const hostile = "<img src=x onerror=alert(1)>\"'\x1b[31m\u202e\xff"

// checkHarmless reports hostile text that arrived unchanged.
func checkHarmless(t *testing.T, page, path string) {
	t.Helper()
	for _, bad := range []string{"<img", "<svg/onload", "<script>alert", "\x1b", "\u202e", "\xff"} {
		expect.That(t, !strings.Contains(page, bad), "%s contains %q", path, bad)
	}
}

func TestHostileBlobsAreText(t *testing.T) {
	f := open(t, "")
	file := f.put("x")
	dir := f.putMessage(&repb.Directory{Files: []*repb.FileNode{{Name: hostile[:28], Digest: file.Proto()}}})
	for _, c := range []struct {
		blob     cas.Digest
		as, want string
	}{
		{f.put("<script>alert(1)</script>\n" + hostile[:28]), "", "&lt;script&gt;alert(1)"},
		{f.put("<svg/onload=alert(1)>"), "", "&lt;svg/onload"},
		{f.put(hostile), "text", `\xff`},
		{f.put(hostile), "", `\xff`},
		{f.put("\xff" + hostile), "", "00000000"},
		{f.put(hostile + "\x00"), "binary", "00000000"},
		{dir, "", "&lt;img"},
		{f.putMessage(&repb.Command{Arguments: []string{"a", "<img src=x onerror=alert(1)>\u202e"}}), "", "&lt;img"},
	} {
		path := at("/cas/", c.blob) + "?as=" + c.as
		page := f.page(path)
		expect.Text(t, page, c.want)
		checkHarmless(t, page, path)
		must.Be(t, json.Valid([]byte(f.page(at("/cas/", c.blob)+".json?as="+c.as))), "%s has invalid JSON", path)
	}
	r := f.request(at("/cas/", dir))
	r.Body.Close()
	expect.Text(t, r.Header.Get("Content-Security-Policy"), "default-src 'none'")
}

func TestRawBlobsAreAttachments(t *testing.T) {
	f := open(t, "")
	d := f.put("<script>alert(1)</script>")
	r := f.request(at("/cas/", d) + "/raw?name=a%2F%22%3C%0D%0Ab.html")
	body := must.Get(io.ReadAll(r.Body))(t)
	r.Body.Close()
	expect.Equal(t, string(body), "<script>alert(1)</script>")
	expect.Equal(t, r.Header.Get("Content-Type"), "application/octet-stream")
	expect.Equal(t, r.Header.Get("Content-Security-Policy"), "default-src 'none'; sandbox")
	expect.Text(t, r.Header.Get("Content-Disposition"), "attachment; filename=")
	code, part := f.get(at("/cas/", d)+"/raw", "Range", "bytes=8-12")
	expect.That(t, code == http.StatusPartialContent && part == "alert", "range: %d %q", code, part)
	other := must.Get(cas.PutBytes(t.Context(), f.Store, cas.BLAKE3, []byte("x")))(t)
	name := fmt.Sprintf("%s-%d", other.Hash(), other.Size())
	expect.Equal(t, f.page("/cas/blake3/"+name+"/raw"), "x")
	expect.Equal(t, f.page("/cas/blake3:"+name+"/raw"), "x")
}

func TestErrorsOfViewers(t *testing.T) {
	f := open(t, "")
	absent := cas.SHA256.Sum([]byte("absent"))
	for _, c := range []struct {
		path, want string
		code       int
	}{
		{at("/cas/", absent), absent.Hash(), http.StatusNotFound},
		{at("/cas/", absent) + "/raw", absent.Hash(), http.StatusNotFound},
		{at("/a/", absent) + "/inputs", absent.Hash(), http.StatusNotFound},
		{at("/a/", absent) + "/repro/report?n=1", "no report", http.StatusNotFound},
		{at("/a/", f.action(absent, "a")) + "/inputs", absent.Hash(), http.StatusNotFound},
		{at("/cas/", f.put("x")) + "?as=tree", "Tree", http.StatusBadRequest},
		{at("/cas/", f.put("x")) + "?as=html", "unknown kind", http.StatusBadRequest},
		{"/cas/xyz", "xyz", http.StatusBadRequest},
		{"/cas/rot13/" + absent.Hash() + "-1", "rot13", http.StatusBadRequest},
		{"/cas/" + absent.Hash() + "-x/raw", "not of the form", http.StatusBadRequest},
		{"/diff?a=/etc/passwd&b=/etc/hosts", "not of the form", http.StatusBadRequest},
		{"/audit?kind=x", "unknown kind", http.StatusBadRequest},
		{"/blobs/sha256/action/xyz/", "not of the form", http.StatusBadRequest},
		{"/nowhere", "no such page", http.StatusNotFound},
	} {
		code, body := f.get(c.path)
		expect.Equal(t, code, c.code, "%s: %s", c.path, body)
		expect.Text(t, body, c.want, "%s", c.path)
	}
}

func TestLinksOfBuildbarnsBrowserAreRedirected(t *testing.T) {
	f := open(t, "")
	name := strings.Repeat("a", 64) + "-4"
	for path, want := range map[string]string{
		"/blobs/sha256/action/" + name + "/":                          "/a/" + name,
		"/x/y/blobs/sha256/command/" + name + "/":                     "/cas/" + name + "?as=command&instance=x%2Fy",
		"/blobs/blake3/directory/" + name + "/":                       "/cas/blake3:" + name + "?as=directory",
		"/blobs/sha256/tree/" + name + "/sub/":                        "/cas/" + name + "?as=tree",
		"/blobs/sha256/file/" + name + "/a.txt":                       "/cas/" + name,
		"/blobs/sha256/historical_execute_response/" + name + "/":     "/cas/" + name + "?as=historical_execute_response",
		"/evil.example%2F..%2F/blobs/sha256/action/" + name + "/#top": "/a/" + name + "?instance=evil.example%2F..%2F",
	} {
		r := f.request(path)
		r.Body.Close()
		if r.StatusCode == http.StatusBadRequest || r.StatusCode == http.StatusMovedPermanently {
			continue // not an instance name, or a path with dots
		}
		expect.That(t, r.StatusCode == http.StatusFound && r.Header.Get("Location") == want, "%s: %d %s, want %s", path, r.StatusCode, r.Header.Get("Location"), want)
	}
}

// zeros is a blob of zeros that is never in memory as a whole.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Neither the page nor the download of a large blob reads all of it into memory.
func TestLargeBlobsTakeLittleMemory(t *testing.T) {
	f := open(t, "")
	const size = 256 << 20
	h := cas.SHA256.New(size)
	must.Get(io.CopyN(h, zeros{}, size))(t)
	d := cas.SHA256.Digest(h, size)
	must.Succeed(t, f.Store.Put(t.Context(), d, io.LimitReader(zeros{}, size)))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	page := f.page(at("/cas/", d))
	runtime.ReadMemStats(&after)
	expect.That(t, after.TotalAlloc-before.TotalAlloc < size/4, "the page of %d bytes took %d", size, after.TotalAlloc-before.TotalAlloc)
	expect.Text(t, page, "the first 4.0 KiB of 256.0 MiB")
	r := f.request(at("/cas/", d) + "/raw")
	defer r.Body.Close()
	n := must.Get(io.Copy(io.Discard, r.Body))(t)
	var end runtime.MemStats
	runtime.ReadMemStats(&end)
	expect.Equal(t, n, int64(size))
	expect.That(t, int64(end.HeapSys)-int64(after.HeapSys) < size/4, "the download of %d bytes took %d more than %d", size, end.HeapSys, after.HeapSys)
}

func TestPagesOfAnAction(t *testing.T) {
	f := open(t, "")
	file := f.put("four")
	sub := f.putMessage(&repb.Directory{Files: []*repb.FileNode{{Name: "used", Digest: file.Proto()}, {Name: "unused", Digest: file.Proto()}}})
	root := f.putMessage(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: hostile[:28], Digest: sub.Proto()}}})
	action := f.action(root, "cc", "-O0")
	execution := must.Get(anypb.New(&cloisterpb.Execution{
		Sandbox: &cloisterpb.Sandbox{Tier: "full"}, Profile: "build", Rule: "default",
		Events: []*cloisterpb.Event{{Kind: "connect", Subject: "tcp 192.0.2.1:80", Process: hostile[:28], Syscall: "connect", Count: 3}},
	}))(t)
	result := &repb.ActionResult{ExitCode: 1, ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{execution}}}
	log := f.put("action x\nunread   " + hostile[:28] + "/unused\n")
	response := f.putMessage(&repb.ExecuteResponse{Result: result, ServerLogs: map[string]*repb.LogFile{"audit": {Digest: log.Proto()}}})
	f.history.Add(history.Entry{Time: time.Now(), How: history.Executed, Action: action.String(), Exit: 1, Response: response.String()})

	inputs := f.page(at("/a/", action) + "/inputs")
	expect.Texts(t, inputs, []string{"&lt;img", "2 files, 8 B", "<svg", "1 unread"})
	checkHarmless(t, inputs, "inputs")
	listing := f.page(at("/a/", action) + "/inputs.json?path=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
	expect.Texts(t, listing, []string{`"read": "unread"`, `"read": "read"`})
	expect.Text(t, f.page(at("/a/", action)+"/inputs?q=unu"), "1 entry")
	violations := f.page(at("/a/", action) + "/sandbox")
	expect.Texts(t, violations, []string{"tcp 192.0.2.1:80", "add what it needs to the inputs", "audit log of the run"})
	checkHarmless(t, violations, "sandbox")

	// Of a run that succeeded, only the cached result has the log, or that all inputs were read.
	for options, c := range map[string]struct {
		details *cloisterpb.Execution
		want    []string
	}{
		"-O3": {&cloisterpb.Execution{AuditLog: log.String(), UnreadInputs: proto.Int64(1)}, []string{`"read": "1 unread"`, `"audited": true`}},
		"-Os": {&cloisterpb.Execution{UnreadInputs: proto.Int64(0)}, []string{`"read": "read"`, `"audited": true`}},
		"-Og": {&cloisterpb.Execution{}, []string{`"audited": false`}},
	} {
		cached := f.action(root, "cc", options)
		must.Succeed(t, f.Actions.Record(t.Context(), cached, &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{
			AuxiliaryMetadata: []*anypb.Any{must.Get(anypb.New(c.details))(t)},
		}}))
		expect.Texts(t, f.page(at("/a/", cached)+"/inputs.json"), c.want, options)
	}

	expect.Texts(t, f.page(at("/a/", action)), []string{"/inputs?instance=", "/sandbox?instance=", "/repro?instance="})

	other := f.action(root, "cc", "-O2")
	diff := f.page(at("/diff?a=", action) + at("&b=", other))
	expect.Texts(t, diff, []string{"argument 2", "-O0", "-O2"})
	expect.Text(t, f.page(at("/diff?a=", action)+at("&b=", action)), "the same")
	expect.Text(t, f.page("/diff"), "<form>")
}

// The pages of actions of many megabytes are bounded.
func TestLargeActionsHaveAPage(t *testing.T) {
	f := open(t, "")
	root := f.putMessage(&repb.Directory{})
	quotes := strings.Repeat("'\"\x00", 300_000)
	many := func(n int) []string { return slices.Repeat([]string{"a b"}, n) }
	var variables []*repb.Command_EnvironmentVariable
	var properties []*repb.Platform_Property
	for range 20_000 {
		variables = append(variables, &repb.Command_EnvironmentVariable{Name: "NAME", Value: "<&>"})
		properties = append(properties, &repb.Platform_Property{Name: "name", Value: "<&>"})
	}
	for name, c := range map[string]struct {
		command *repb.Command
		less    bool
	}{
		"small":          {&repb.Command{Arguments: []string{"cc"}}, false},
		"a long word":    {&repb.Command{Arguments: []string{"sh", "-c", quotes}}, true},
		"many words":     {&repb.Command{Arguments: many(50_000)}, true},
		"a long value":   {&repb.Command{EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A", Value: quotes}}}, true},
		"many variables": {&repb.Command{EnvironmentVariables: variables}, true},
		"many platforms": {&repb.Command{Platform: &repb.Platform{Properties: properties}}, true},
		"many outputs":   {&repb.Command{OutputPaths: many(50_000)}, true},
		"a long path":    {&repb.Command{WorkingDirectory: quotes}, true},
	} {
		t.Run(name, func(t *testing.T) {
			action := f.putMessage(&repb.Action{CommandDigest: f.putMessage(c.command).Proto(), InputRootDigest: root.Proto()})
			result := &repb.ActionResult{StdoutRaw: []byte(quotes[:300_000])}
			for range 5000 {
				result.OutputSymlinks = append(result.OutputSymlinks, &repb.OutputSymlink{Path: "out", Target: "<"})
			}
			if !c.less {
				result = &repb.ActionResult{}
			}
			must.Succeed(t, f.Actions.Record(t.Context(), action, result))
			page := f.page(at("/a/", action))
			expect.Equal(t, strings.Contains(page, "too long for a page"), c.less, "the page is shortened")
			expect.That(t, len(page) < 6<<20, "the page has %d bytes", len(page))
			checkHarmless(t, page, name)
			facts := f.page(at("/a/", action) + ".json")
			expect.Equal(t, strings.Contains(facts, `"shortened": true`), c.less, "the data is shortened")
			f.page(at("/a/", action) + "/inputs")
		})
	}
}

// The page of a tree of 200,000 files shows a part of it, and every directory can be reached.
func TestLargeTreesArePaged(t *testing.T) {
	f := open(t, "")
	file := f.put("four").Proto()
	root := &repb.Directory{}
	for d := range 200 {
		dir := &repb.Directory{}
		for n := range 1000 {
			dir.Files = append(dir.Files, &repb.FileNode{Name: fmt.Sprintf("file-%d-%04d", d, n), Digest: file})
		}
		root.Directories = append(root.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("dir-%03d", d), Digest: f.putMessage(dir).Proto()})
	}
	wide := &repb.Directory{}
	for n := range 2500 {
		wide.Files = append(wide.Files, &repb.FileNode{Name: fmt.Sprintf("wide-%04d", n), Digest: file})
	}
	root.Directories = append(root.Directories, &repb.DirectoryNode{Name: "wide", Digest: f.putMessage(wide).Proto()})
	action := f.action(f.putMessage(root), "cc")
	inputs := at("/a/", action) + "/inputs"
	begun := time.Now()
	page := f.page(inputs)
	t.Logf("%d bytes in %v", len(page), time.Since(begun))
	expect.Texts(t, page, []string{"202500 files", "dir-199", "<svg"})
	for path, want := range map[string]int{"": 201, "dir-007": 1000, "wide": 1000, "wide&from=1000": 1000, "wide&from=2000": 500} {
		begun := time.Now()
		var d struct {
			Entries []struct{ Name string }
			Next    int
		}
		must.Succeed(t, json.Unmarshal([]byte(f.page(inputs+".json?path="+path)), &d))
		expect.That(t, len(d.Entries) == want && (d.Next > 0) == (path == "wide" || path == "wide&from=1000"), "%s: %d entries, next %d", path, len(d.Entries), d.Next)
		html := f.page(inputs + "?path=" + path)
		expect.That(t, len(html) < 1<<20, "%s: the page has %d bytes", path, len(html))
		t.Logf("%q: %d bytes; page and data in %v", path, len(html), time.Since(begun))
	}
	begun = time.Now()
	expect.Text(t, f.page(inputs+"?q=file-19"), "200 entries; the search reached its limit", "search")
	t.Logf("search in %v", time.Since(begun))
}

func TestReportsOfChecks(t *testing.T) {
	f := open(t, "")
	action := f.action(f.put(""), "date")
	expect.Text(t, f.page(at("/a/", action)+"/repro"), "has not checked this action")
	v := &repro.Verdict{
		Action: action.String(), Result: repro.Differs, Runs: []repro.Run{{On: "a"}, {On: "b"}},
		Outputs: []repro.Output{{Path: "<img src=x>", Kind: "file", Digests: []string{"1/1", "2/1"}, Differ: true}},
	}
	report := f.put(string(must.Get(json.Marshal(v))(t)))
	f.history.Add(history.Entry{Time: time.Now(), How: history.Checked, Action: action.String(), Verdict: "differs", Response: report.String()})
	page := f.page(at("/a/", action) + "/repro")
	expect.Texts(t, page, []string{"<strong>differs</strong>", "/repro/report?instance=&amp;n=1", "cloister repro"})
	matrix := f.page(at("/a/", action) + "/repro/report?n=1")
	expect.Texts(t, matrix, []string{"&lt;img src=x&gt;", "run 2"})
	checkHarmless(t, matrix, "report")
}

func TestAuditPage(t *testing.T) {
	f := open(t, "")
	expect.Text(t, f.page("/audit"), "no entries")
	for i, kind := range []sandbox.EventKind{sandbox.EventConnect, sandbox.EventWrite} {
		must.Succeed(t, f.audit.Append(audit.Entry{
			Time: time.Now(), Action: cas.SHA256.Sum([]byte{byte(i)}).String(), Target: hostile, Events: []sandbox.Event{{Kind: kind, Subject: hostile, Count: 1}},
		}))
	}
	all := f.page("/audit")
	expect.Texts(t, all, []string{"intact from entry 1", "connect: ", "write: "})
	checkHarmless(t, all, "audit")
	expect.That(t, !strings.Contains(f.page("/audit?kind=write"), "connect: "), "the filter by kind shows others")
}

// Pages show what the caller of the browser may read.
func TestViewersNeedRights(t *testing.T) {
	f := open(t, "[{write: other}]")
	d := f.put("x")
	for _, path := range []string{at("/cas/", d), at("/cas/", d) + "/raw", at("/a/", d) + "/inputs", at("/diff?a=", d) + at("&b=", d), "/audit"} {
		f.token = ""
		code, _ := f.get(path)
		expect.That(t, code == http.StatusUnauthorized || code == http.StatusForbidden, "%s without a token: %d", path, code)
		f.token = token
		code, _ = f.get(path)
		expect.Equal(t, code, http.StatusForbidden, "%s", path)
	}
	reader := open(t, "[read]")
	reader.token = token
	d = reader.put("x")
	expect.Text(t, reader.page(at("/cas/", d)), "    1  x")
	code, _ := reader.get("/audit")
	expect.Equal(t, code, http.StatusForbidden)
}
