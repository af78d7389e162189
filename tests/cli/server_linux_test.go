// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/digest"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A remote is a running serve on a non-default port with a client of one instance.
type remote struct {
	*client.Client
	cas string // its address for --cas
	dir string // its store
	log *bytes.Buffer
}

// serving starts a server with additional flags; it ends with the test.
func serving(t *testing.T, instance string, flags ...string) *remote {
	t.Helper()
	s, dir, log := start(t, flags...)
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	c, err := client.NewClient(t.Context(), instance, client.DialParams{Service: s.Addr, NoSecurity: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &remote{c, "grpc://" + s.Addr, dir, log}
}

// putting returns a function that stores a message on the server.
func (r *remote) putting(t *testing.T) func(proto.Message) *repb.Digest {
	return func(m proto.Message) *repb.Digest {
		t.Helper()
		d, err := r.WriteProto(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		return d.ToProto()
	}
}

// execute executes a shell script on the server with one input, the file input, and one output, the file out. It returns the
// action's digest and response.
func (r *remote) execute(t *testing.T, script string) (string, *repb.ExecuteResponse) {
	t.Helper()
	return r.submit(t, script, &repb.Action{})
}

// submit is execute for a modified action.
func (r *remote) submit(t *testing.T, script string, a *repb.Action) (string, *repb.ExecuteResponse) {
	t.Helper()
	blob, err := r.WriteBlob(t.Context(), []byte("an input\n"))
	if err != nil {
		t.Fatal(err)
	}
	put := r.putting(t)
	a.CommandDigest = put(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"out"}})
	a.InputRootDigest = put(&repb.Directory{Files: []*repb.FileNode{{Name: "input", Digest: blob.ToProto()}}})
	action := put(a)
	op, err := r.ExecuteAndWait(t.Context(), &repb.ExecuteRequest{InstanceName: r.InstanceName, ActionDigest: action})
	if err != nil {
		t.Fatal(err)
	}
	var response repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&response); err != nil {
		t.Fatal(err)
	}
	return digest.NewFromProtoUnvalidated(action).String(), &response
}

// read returns a blob as text.
func (r *remote) read(t *testing.T, d *repb.Digest) string {
	t.Helper()
	b, _, err := r.ReadBlob(t.Context(), digest.NewFromProtoUnvalidated(d))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// hostile is a script that attempts to change its input and fails.
const hostile = "cat input; echo x >> input; echo here >&2; exit 3"

// TestReproduceLineDoesWhatTheActionDid checks that the command in a failed action's message has the same output and exit code,
// for any instance name and address.
func TestReproduceLineDoesWhatTheActionDid(t *testing.T) {
	for _, instance := range []string{"", "main", "team's one"} {
		r := serving(t, instance)
		action, response := r.execute(t, hostile)
		_, line, ok := strings.Cut(response.Message, "\ncloister: reproduce: ")
		if line, _, _ = strings.Cut(line, "\n"); !ok || !strings.HasPrefix(line, "cloister run --action "+action) {
			t.Fatalf("got no reproduce line for action %s in message\n%s", action, response.Message)
		}
		ctx, path := built.Within(t, time.Minute)
		cmd := exec.CommandContext(ctx, "/bin/sh", "-c", line)
		cmd.Env = []string{"PATH=" + filepath.Dir(path) + ":/usr/bin:/bin"}
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		_ = cmd.Run() // the exit code is checked below
		if got, want := cmd.ProcessState.ExitCode(), int(response.Result.ExitCode); got != want || got != 3 {
			t.Errorf("%s: got exit code %d, want %d as on the server", line, got, want)
		}
		if got, want := out.String(), r.read(t, response.Result.StdoutDigest); got != want || want != "an input\n" {
			t.Errorf("%s: got stdout %q, want %q as on the server", line, got, want)
		}
		const tried = "cloister: tried to write /build/input: not an output (sh, openat)\n"
		if got, want := stderr.String(), r.read(t, response.Result.StderrDigest)+tried; got != want {
			t.Errorf("%s: got stderr %q, want %q as on the server", line, got, want)
		}
		if !strings.Contains(response.Message, tried) {
			t.Errorf("got message\n%s\nwant %q in it", response.Message, tried)
		}
	}
}

func TestRunOfAStoredAction(t *testing.T) {
	r := serving(t, "")
	action, _ := r.execute(t, "cat input > out")
	dir := t.TempDir()
	s := cloister(t, dir, "run", "--action", action, "--cas", r.cas)
	if want := (output{"", "cloister: outputs are dropped (1); --out-dir DIR keeps them\n", 0}); s != want {
		t.Errorf("got %+v, want %+v", s, want)
	}
	if s := cloister(t, dir, "run", "--action", action, "--cas", r.cas, "--out-dir", "kept"); s != (output{}) {
		t.Errorf("--out-dir: got %+v", s)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "kept/out")); err != nil || string(got) != "an input\n" {
		t.Errorf("kept/out: got %q, %v", got, err)
	}

	ctx, path := built.Within(t, time.Minute)
	cmd := exec.CommandContext(ctx, path, "run", "--action", action, "--cas", r.cas, "--shell")
	cmd.Stdin = strings.NewReader("pwd; ls; exit 4\n")
	out, err := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 4 {
		t.Errorf("--shell: got exit code %d (%v), want 4", code, err)
	}
	text := strings.ReplaceAll(string(out), "\r\n", "\n")
	for _, want := range []string{"/bin/sh -c 'cat input > out'\n", "/build\n", "input\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("--shell: got\n%s\nwant %q in it", text, want)
		}
	}
}

func TestAbsentAction(t *testing.T) {
	r := serving(t, "")
	absent := strings.Repeat("0", 63) + "1/5"
	for _, command := range [][]string{{"run", "--action"}, {"action", "show"}} {
		args := append(command, absent, "--cas", r.cas)
		if s := cloister(t, "", args...); s.code != 4 || s.out != "" || !whole(`cloister: .*`+absent+`.*\n`, s.err) {
			t.Errorf("%v: got %+v, want exit code 4 and a line with %q", args, s, absent)
		}
	}
}

// TestTierIsReported checks that the startup output and every result name the tier.
func TestTierIsReported(t *testing.T) {
	for tier, line := range map[string]string{
		"full":       `(?m)^sandbox  .* namespaces, .*seccomp, .*monitor   \(full\)$`,
		"namespaces": `(?m)^sandbox  \S+ namespaces(, \S+ limits)?   \(namespaces\)\n +not enforced: .*seccomp, landlock, monitor[;,]`,
	} {
		r := serving(t, "", "--sandbox="+tier)
		if text := r.log.String(); !regexp.MustCompile(line).MatchString(text) {
			t.Errorf("--sandbox=%s: got\n%s\nwant a line that matches %q", tier, text, line)
		}
		action, _ := r.execute(t, "cat input > out")
		s := cloister(t, "", "action", "show", action, "--cas", r.cas)
		for _, want := range []string{
			"action       " + action + "\n", "command      /bin/sh -c 'cat input > out'\n", "declares     out\n", "result       exit code 0\n",
			" sandbox.tier " + tier + "\n", " profile build\n",
		} {
			if s.code != 0 || !strings.Contains(s.out, want) {
				t.Errorf("--sandbox=%s: action show: got exit code %d and\n%s%s\nwant 0 and %q", tier, s.code, s.out, s.err, want)
			}
		}
	}
}

// TestRefusedPropertyIsInTheAuditLog checks the entry of an action that never ran.
func TestRefusedPropertyIsInTheAuditLog(t *testing.T) {
	r := serving(t, "main")
	put := r.putting(t)
	action := put(&repb.Action{
		CommandDigest:   put(&repb.Command{Arguments: []string{"/bin/true"}}),
		InputRootDigest: put(&repb.Directory{}),
		Platform:        &repb.Platform{Properties: []*repb.Platform_Property{{Name: "cloister-network", Value: "192.0.2.1:443"}}},
	})
	op, err := r.ExecuteAndWait(t.Context(), &repb.ExecuteRequest{InstanceName: r.InstanceName, ActionDigest: action})
	var response repb.ExecuteResponse
	if err == nil {
		err = op.GetResponse().UnmarshalTo(&response)
	}
	if err == nil {
		err = status.FromProto(response.Status).Err()
	}
	if status.Code(err) != codes.FailedPrecondition {
		t.Fatalf("got %v, want FAILED_PRECONDITION", err)
	}
	s := cloister(t, "", "audit", "ls", "--dir="+r.dir, "--kind", "refused", "--action", action.Hash)
	want := `\S+Z  ` + action.Hash[:12] + `  refused  asked for cloister-network=192\.0\.2\.1:443: not run, rule "default" .*\n`
	if s.code != 0 || !whole(want, s.out) {
		t.Errorf("got %+v, want %q", s, want)
	}
	if s := cloister(t, "", "audit", "show", "--dir="+r.dir, "1"); !strings.Contains(s.out, "\nexit        -1\n") {
		t.Errorf("got %+v, want the exit code -1", s)
	}
}

func TestAuditLog(t *testing.T) {
	r := serving(t, "main")
	dir := "--dir=" + r.dir
	if s := cloister(t, "", "audit", "ls", dir); s != (output{"", "the log has no entries\n", 0}) {
		t.Errorf("ls of an empty log: got %+v", s)
	}
	r.execute(t, "cat input > out")
	action, _ := r.execute(t, hostile)
	other, _ := r.execute(t, "echo x > beside; cat input > out")

	const write, left = "tried to write /build/input: not an output (sh, openat)", "left beside: not a declared output"
	line := func(action, kind, text string) string {
		return `\S+Z  ` + action[:12] + fmt.Sprintf("  %-7s  ", kind) + regexp.QuoteMeta(text) + `\n`
	}
	verified := cloister(t, "", "audit", "verify", dir)
	if !whole(`2 entries, head [0-9a-f]{64}\n`, verified.out) || verified.code != 0 {
		t.Fatalf("verify: got %+v", verified)
	}
	head := verified.out[len("2 entries, head ") : len(verified.out)-1]
	for _, c := range []struct {
		args []string
		code int
		out  string // regular expressions for the complete output
		err  string
	}{
		{[]string{"ls"}, 0, line(action, "write", write) + line(other, "output", left), `2 lines of 2 entries, head ` + head + `\n`},
		{[]string{"ls", "--kind", "output"}, 0, line(other, "output", left), `1 lines of 2 entries, .*\n`},
		{[]string{"ls", "--action", action}, 0, line(action, "write", write), `1 lines of 2 entries, .*\n`},
		{[]string{"ls", "-n", "1"}, 0, line(other, "output", left), `.*\n`},
		{[]string{"ls", "--json", "--action", action}, 0, `\{"seq":1,.*"action":"` + action + `","instance":"main",.*\}\n`, `.*\n`},
		{[]string{"show", "1"}, 0, `(?s)entry       1\n.*action      ` + action + `\ninstance    main\n.*exit        3\nwrite       ` + regexp.QuoteMeta(write) + `\n.*`, ``},
		{[]string{"show", other[:8]}, 0, `(?s)entry       2\n.*output      ` + regexp.QuoteMeta(left) + `\n.*`, ``},
		{[]string{"show", "3"}, 1, ``, `cloister: .*\n`},
		{[]string{"verify", "--head", head}, 0, `2 entries, head ` + head + `\n`, ``},
		{[]string{"verify", "--head", strings.Repeat("0", 63) + "1"}, 1, ``, `cloister: .*\n`},
	} {
		s := cloister(t, "", append([]string{"audit", dir}, c.args...)...)
		if s.code != c.code || !whole(c.out, s.out) || !whole(c.err, s.err) {
			t.Errorf("audit %v: got exit code %d, want %d\nstdout %q\n  want %q\nstderr %q\n  want %q", c.args, s.code, c.code, s.out, c.out, s.err, c.err)
		}
	}

	// A copy with one word changed.
	tampered := t.TempDir()
	if err := os.CopyFS(filepath.Join(tampered, "audit"), os.DirFS(filepath.Join(r.dir, "audit"))); err != nil {
		t.Fatal(err)
	}
	segments, err := filepath.Glob(filepath.Join(tampered, "audit", "*.jsonl"))
	if err != nil || len(segments) != 1 {
		t.Fatalf("got segments %q, %v, want one", segments, err)
	}
	text, err := os.ReadFile(segments[0])
	if err != nil || !bytes.Contains(text, []byte("/build/input")) {
		t.Fatalf("got segment %q, %v, want /build/input in it", text, err)
	}
	if err := os.Chmod(segments[0], 0o600); err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte("/build/input"), []byte("/build/image"), 1)
	if err := os.WriteFile(segments[0], text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"verify", "ls"} {
		s := cloister(t, "", "audit", command, "--dir", tampered)
		if s.code != 1 || s.out != "" || !whole(`cloister: .*`+regexp.QuoteMeta(filepath.Base(segments[0]))+`.*1.*\n`, s.err) {
			t.Errorf("%s of a modified log: got %+v, want exit code 1 and the place", command, s)
		}
	}
}
