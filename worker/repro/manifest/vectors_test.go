// SPDX-License-Identifier: Apache-2.0

package manifest_test

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

var update = flag.Bool("update", false, "rewrite the vectors in testdata")

// spec returns the text of a Spec with a command.
func spec(args ...string) string {
	s := sandbox.Spec{
		Args: args, Dir: "/build", Env: []string{"HOME=/tmp", "PATH=/usr/bin:/bin"},
		Inputs: []sandbox.Input{
			{Target: "/usr", Content: "host"},
			{Target: "/build", Content: cas.SHA256.Sum([]byte("root")).String()},
		},
		Outputs: []sandbox.Output{{Target: "/build"}}, Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 4 << 30}},
		Network: sandbox.Network{
			Loopback: true,
		}, Limits: sandbox.DefaultLimits(), Timeout: time.Hour, Grace: 5 * time.Second,
	}
	return s.Text()
}

// plain returns the manifest of a run without outputs.
func plain() *manifest.Manifest {
	at := time.Date(2026, 11, 21, 19, 15, 0, 0, time.UTC)
	after := func(ms int) time.Time { return at.Add(time.Duration(ms) * time.Millisecond) }
	return &manifest.Manifest{
		Action: cas.SHA256.Sum(
			[]byte("action")), Command: cas.SHA256.Sum([]byte("command")), InputRoot: cas.SHA256.Sum([]byte("root")),
		Stdout: cas.SHA256.Sum(nil), Stderr: cas.SHA256.Sum(nil),
		Spec:          spec("/bin/true"),
		Configuration: manifest.Configuration{Profile: "build", Hermetic: true, LogBytes: 32 << 20},
		Toolchain: manifest.Toolchain{
			Host: manifest.Host{
				OS:           "debian",
				Version:      "12",
				Architecture: "amd64",
				Kernel:       "Linux",
				Release:      "6.18.5",
			},
			Complete: true,
			Programs: []manifest.Program{
				{Path: "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", Sum: cas.SHA256.Sum([]byte("ld.so")).Hash()},
				{Path: "/bin/true", Sum: cas.SHA256.Sum([]byte("true")).Hash()},
			},
		},
		Status: "OK",
		Volatile: manifest.Volatile{
			Worker: "one", Backend: "namespace", Tier: "full", Audit: "attempts", Policy: cas.SHA256.Sum([]byte("policy")).Hash(), Rule: "default",
			Queued: at, Began: after(1), Staging: after(2), Staged: after(3), Started: after(4), Ended: after(1004),
			Usage: sandbox.Usage{
				User:          1500 * time.Microsecond,
				System:        500 * time.Microsecond,
				PeakRSS:       1 << 20,
				PeakProcesses: 2,
			},
		},
	}
}

// vectors change plain to the manifests in testdata.
var vectors = map[string]func(m *manifest.Manifest){
	"plain": func(*manifest.Manifest) {},
	"outputs": func(m *manifest.Manifest) {
		m.Spec = spec("cc", "-o", "out/app", "main.c")
		m.Stdout = cas.SHA256.Sum([]byte("compiled\n"))
		blob := cas.SHA256.Sum
		m.Outputs = []manifest.Output{
			{Kind: manifest.Symlink, Path: "out/latest", Target: "app"},
			{Kind: manifest.Executable, Path: "out/app", Digest: blob([]byte("program"))},
			{Kind: manifest.File, Path: "out/app.d", Digest: blob([]byte("dependencies"))},
			{Kind: manifest.Root, Path: "include", Digest: blob([]byte("Directory"))},
			{Kind: manifest.Tree, Path: "include", Digest: blob([]byte("Tree"))},
			{Kind: manifest.File, Path: "out/empty", Digest: blob(nil)},
		}
		m.Volatile.Fingerprint = blob([]byte("toolchain")).Hash()
		m.Volatile.Programs = []manifest.Program{
			{Path: "/bin/sleep", Sum: blob([]byte("sleep")).Hash()}, {Path: "/bin/ps", Sum: manifest.Unreadable},
		}
	},
	"failed": func(m *manifest.Manifest) {
		m.Spec = spec("sleep", "7200")
		m.Status, m.ExitCode = "DeadlineExceeded", 143
		m.Stderr = cas.SHA256.Sum([]byte("Terminated\n"))
		m.Toolchain.Complete = false
		m.Toolchain.Programs = []manifest.Program{{Path: "/usr/bin/sleep", Sum: manifest.Unreadable}}
		m.Volatile.Unenforced = []sandbox.Limit{sandbox.LimitMemory, sandbox.LimitProcesses}
		m.Volatile.Tier, m.Volatile.Audit, m.Volatile.Events = "namespaces", "off", 3
	},
	"seeded": func(m *manifest.Manifest) {
		seed := uint64(1<<64 - 1)
		m.Seed, m.Revision, m.Order = &seed, "4b825dc642cb6eb9a060e54bf8d69288fbee4904", 7
		m.Volatile.WorkerRequest = 2
	},
	"names": func(m *manifest.Manifest) {
		m.Spec = spec("printf", "a\nb\t\"c\"\\ \x01\x7f\u00e9\u202e\U0001f600")
		m.Configuration.Profile = `with "quotes" and \`
		for _, name := range []string{" ", "volatile", "new\nline", "\xff not UTF-8", "\u00e9", "\U0001f600", "right \u202e left", "\x1b[2J", "\ufffd", "b", "B", "a b", "a"} {
			m.Outputs = append(m.Outputs,
				manifest.Output{Kind: manifest.File, Path: name, Digest: cas.SHA256.Sum([]byte(name))})
		}
		m.Outputs = append(m.Outputs, manifest.Output{Kind: manifest.Symlink, Path: "link", Target: "../\n\"x\""})
	},
	"remote-apis": func(m *manifest.Manifest) {
		m.Configuration.Hermetic = false
		m.RemoteAPIs = manifest.NewRemoteAPIs(fetched(3))
	},
	"remote-apis-many": func(m *manifest.Manifest) {
		m.RemoteAPIs = manifest.NewRemoteAPIs(fetched(manifest.MaxFetched + 1))
	},
	"blake3": func(m *manifest.Manifest) {
		sum := cas.BLAKE3.Sum
		m.Action, m.Command, m.InputRoot = sum([]byte("action")), sum([]byte("command")), sum([]byte("root"))
		m.Stdout, m.Stderr = sum(nil), sum(nil)
		m.Outputs = []manifest.Output{{Kind: manifest.File, Path: "o", Digest: sum([]byte("o"))}}
	},
}

// fetched returns blobs and a result.
func fetched(n int) []manifest.Fetched {
	all := []manifest.Fetched{{Digest: cas.SHA256.Sum([]byte("inner action")), Sum: cas.SHA256.Sum([]byte("result")).Hash()}}
	for i := range n - 1 {
		all = append(all, manifest.Fetched{Digest: cas.SHA256.Sum([]byte(fmt.Sprint("blob ", i)))})
	}
	return all
}

func vector(name string) *manifest.Manifest {
	m := plain()
	vectors[name](m)
	return m
}

// TestSandboxIsStable: a backend with a kernel of its own changes the stable hash, and others change nothing.
func TestSandboxIsStable(t *testing.T) {
	seen := map[string]string{plain().StableHash(): "namespaces"}
	for _, backend := range []string{"gvisor", "microvm", "qemu", "qemu-tcg"} {
		usual, own := plain(), plain()
		own.Sandbox = backend
		line := fmt.Sprintf("sandbox %q\n", backend)
		if text := strings.Replace(own.Text(), line, "", 1); text != usual.Text() || seen[own.StableHash()] != "" {
			t.Errorf("got\n%s\nwant one more line than\n%s\nand another stable hash, not that of %q", own.Text(), usual.Text(), seen[own.StableHash()])
		}
		seen[own.StableHash()] = backend
		read, err := manifest.Parse([]byte(own.Text()))
		expect.That(t, err == nil && read.Sandbox == backend, "got %+v, %v, want it back", read, err)
	}
}

func TestVectors(t *testing.T) {
	var hashes strings.Builder
	names := []string{"blake3", "failed", "names", "outputs", "plain", "remote-apis", "remote-apis-many", "seeded"}
	must.Be(t, len(names) == len(vectors), "%d names for %d vectors", len(names), len(vectors))
	for _, name := range names {
		m := vector(name)
		file := filepath.Join("testdata", name+".manifest")
		hashes.WriteString(m.StableHash() + "  " + name + ".manifest\n")
		if *update {
			must.Succeed(t, os.WriteFile(file, []byte(m.Text()), 0o644))
		}
		want, err := os.ReadFile(file)
		must.Succeed(t, err)
		expect.Equal(t, m.Text(), string(want), "%s", name)
		again, err := manifest.Parse(want)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if again.Text() != string(want) || again.StableHash() != m.StableHash() || len(manifest.Diff(m, again)) > 0 {
			t.Errorf("%s: parsed as\n%s", name, again.Text())
		}
	}
	if *update {
		must.Succeed(t, os.WriteFile("testdata/stable-hashes", []byte(hashes.String()), 0o644))
	}
	if want, err := os.ReadFile("testdata/stable-hashes"); err != nil || hashes.String() != string(want) {
		t.Errorf("%v: got\n%s\nwant\n%s", err, &hashes, want)
	}
}

// verify runs verify.sh on a copy of the vectors.
func verify(t *testing.T, change func(dir string)) error {
	t.Helper()
	for _, tool := range []string{"sh", "sed", "sort", "sha256sum"} {
		sandboxtest.Tool(t, tool)
	}
	dir := t.TempDir()
	must.Succeed(t, os.CopyFS(dir, os.DirFS("testdata")))
	if change != nil {
		change(dir)
	}
	out, err := exec.CommandContext(t.Context(), "sh", "testdata/verify.sh", dir).CombinedOutput()
	t.Logf("%s", out)
	return err
}

// The script shares no code with this package.
func TestScriptVerifiesVectorsAndFindsChanges(t *testing.T) {
	if err := verify(t, nil); err != nil {
		t.Fatalf("verify.sh rejects the vectors: %v", err)
	}
	for name, change := range map[string][3]string{
		"another exit code":        {"failed", "exit 143", "exit 144"},
		"another argument":         {"outputs", `spec arg "cc"`, `spec arg "cd"`},
		"another program":          {"plain", `program "/bin/true"`, `program "/bin/false"`},
		"another configuration":    {"plain", "hermetic true", "hermetic false"},
		"missing line":             {"seeded", "order 7\n", ""},
		"outputs in another order": {"names", "output \"B\"", "output \"z\""},
		"early separator":          {"plain", "status OK", "volatile\nstatus OK"},
	} {
		err := verify(t, func(dir string) {
			file := filepath.Join(dir, change[0]+".manifest")
			text, err := os.ReadFile(file)
			if err != nil || !strings.Contains(string(text), change[1]) {
				t.Fatalf("%s: %v, or it lacks %q", file, err, change[1])
			}
			must.Succeed(t, os.WriteFile(file, []byte(strings.Replace(string(text), change[1], change[2], 1)), 0o644))
		})
		if exit := new(exec.ExitError); !errors.As(err, &exit) {
			t.Errorf("%s: got %v, want an exit error", name, err)
		}
	}
	// Lists must be sorted and without duplicates even if all hashes match.
	for name, change := range map[string]func(lines []string) []string{
		"outputs in another order": func(l []string) []string { slices.Reverse(l); return l },
		"an output twice":          func(l []string) []string { return slices.Concat(l[:1], l) },
	} {
		expect.That(t, verify(t, func(dir string) { rewrite(t, dir, "output ", change) }) != nil, "%s: accepted", name)
		expect.That(t, verify(t, func(dir string) { rewrite(t, dir, "toolchain program ", change) }) != nil,
			"%s, programs: accepted", name)
	}
	if err := verify(t, func(dir string) { rewrite(t, dir, "output ", func(l []string) []string { return l[1:] }) }); err != nil {
		t.Errorf("verify.sh rejects a valid text: %v", err)
	}
	// The volatile part may change.
	if err := verify(t, func(dir string) {
		file := filepath.Join(dir, "plain.manifest")
		text := must.Get(os.ReadFile(file))(t)
		other := strings.Replace(string(text), `worker "one"`, `worker "two"`, 1)
		must.Succeed(t, os.WriteFile(file, []byte(other), 0o644))
	}); err != nil {
		t.Errorf("another worker changes the stable hash: %v", err)
	}
}

// rewrite changes the lines of the vector "outputs" that begin with prefix, and all hashes with them.
func rewrite(t *testing.T, dir, prefix string, change func(lines []string) []string) {
	t.Helper()
	file := filepath.Join(dir, "outputs.manifest")
	b := must.Get(os.ReadFile(file))(t)
	stable, rest, _ := strings.Cut(string(b), "volatile\n")
	var before, list, after []string
	for line := range strings.Lines(stable) {
		switch {
		case strings.HasPrefix(line, prefix):
			list = append(list, line)
		case list == nil:
			before = append(before, line)
		default:
			after = append(after, line)
		}
	}
	must.Be(t, len(list) >= 2, "%d lines begin with %q, want 2 or more", len(list), prefix)
	all := slices.Concat(before, change(list), after)
	h := sha256.New()
	for _, line := range all {
		if toolchain, ok := strings.CutPrefix(line, "toolchain "); ok {
			h.Write([]byte(toolchain))
		}
	}
	for i, line := range all {
		if strings.HasPrefix(line, "toolchain-hash ") {
			all[i] = fmt.Sprintf("toolchain-hash %x\n", h.Sum(nil))
		}
	}
	text := strings.Join(all, "")
	sums := fmt.Sprintf("%x outputs.manifest\n", sha256.Sum256([]byte(text)))
	must.Succeed(t, errors.Join(os.WriteFile(file, []byte(text+"volatile\n"+rest), 0o644), os.WriteFile(filepath.Join(dir, "stable-hashes"), []byte(sums), 0o644)))
}

func TestTextSortsLists(t *testing.T) {
	a, b := vector("outputs"), vector("outputs")
	slices.Reverse(b.Outputs)
	slices.Reverse(b.Toolchain.Programs)
	b.Outputs = append(b.Outputs, b.Outputs[0])
	expect.Equal(t, b.Text(), a.Text())
}

// TestFetchedIsStable: what a run fetched changes the stable hash, in whatever order it did, and the difference names
// it.
func TestFetchedIsStable(t *testing.T) {
	for _, n := range []int{0, 3, manifest.MaxFetched + 1} {
		a, b, none := plain(), plain(), plain()
		all := fetched(max(n, 1))[:n]
		a.RemoteAPIs = manifest.NewRemoteAPIs(all)
		b.RemoteAPIs = manifest.NewRemoteAPIs(reversed(all))
		if a.StableHash() != b.StableHash() || a.StableHash() == none.StableHash() {
			t.Errorf("%d: got\n%s\nand\n%s", n, a.Text(), b.Text())
		}
	}
	a, b := vector("remote-apis"), vector("remote-apis")
	b.RemoteAPIs.Fetched[0].Sum = cas.SHA256.Sum([]byte("another result")).Hash()
	if d := manifest.Diff(a, b); len(d) != 2 || !strings.HasPrefix(d[1].A, "remote-apis result ") || !strings.HasPrefix(d[1].B, "remote-apis result ") {
		t.Errorf("another result: got %q", d)
	}
	b.RemoteAPIs = manifest.NewRemoteAPIs(a.RemoteAPIs.Fetched[:2])
	if d := manifest.Diff(a, b); len(d) != 3 || d[2].B != "" || !strings.HasPrefix(d[2].A, "remote-apis blob ") {
		t.Errorf("one blob less: got %q", d)
	}
}

func reversed(all []manifest.Fetched) []manifest.Fetched {
	all = slices.Clone(all)
	slices.Reverse(all)
	return all
}
