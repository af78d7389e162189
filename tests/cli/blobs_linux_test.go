// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
)

// wantOutput runs the program and checks its exit code and for texts on standard output, or on either output if the code is not 0.
func wantOutput(t *testing.T, code int, args []string, texts ...string) output {
	t.Helper()
	s := cloister(t, "", args...)
	all := s.out
	if code != 0 {
		all += s.err
	}
	if s.code != code {
		t.Fatalf("cloister %v: got exit code %d, want %d\n%s%s", args, s.code, code, s.out, s.err)
	}
	for _, text := range texts {
		if !strings.Contains(all, text) {
			t.Errorf("cloister %v: got\n%s%s\nwant %q in it", args, s.out, s.err, text)
		}
	}
	return s
}

// TestBlobsOfAServer checks that blobs of every digest function are returned unchanged, and that absent ones are errors.
func TestBlobsOfAServer(t *testing.T) {
	f := farming(t)
	at := func(args ...string) []string {
		return append(args, "--cas", "grpc://"+f.server.Addr, "--instance", "main")
	}
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	for name, text := range map[string]string{"a.txt": "alpha", "sub/b.txt": "beta", "sub/deep/c": strings.Repeat("c", 100_000)} {
		path := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(src, "sub/b.txt"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../a.txt", filepath.Join(src, "sub/link")); err != nil {
		t.Fatal(err)
	}
	for _, fn := range cas.Functions() {
		want := fn.Sum([]byte("alpha")).String()
		s := wantOutput(t, 0, at("cas", "put", filepath.Join(src, "a.txt"), src, "--digest-function", fn.String()), want)
		lines := strings.Split(strings.TrimSpace(s.out), "\n")
		if len(lines) != 2 {
			t.Fatalf("%v: put: got %q, want two lines", fn, s.out)
		}
		root, _, _ := strings.Cut(lines[1], " ")

		if s := wantOutput(t, 0, at("cas", "cat", want, want)); s.out != "alphaalpha" {
			t.Errorf("%v: cat: got %q, want %q", fn, s.out, "alphaalpha")
		}
		wantOutput(t, 0, at("cas", "ls", root), "a.txt", "d            -  sub/")
		wantOutput(t, 0, at("cas", "ls", root, "sub"), "x            4  sub/b.txt", "sub/link -> ../a.txt", "sub/deep/")
		wantOutput(t, 0, at("cas", "ls", root, "sub/b.txt"), fn.Sum([]byte("beta")).String())
		wantOutput(t, 4, at("cas", "ls", root, "sub/none"), "sub/none")
		s = wantOutput(t, 0, at("cas", "tree", root), "sub/deep/c")
		if n := strings.Count(s.out, "\n"); n != 6 {
			t.Errorf("%v: tree: got %d lines, want 6:\n%s", fn, n, s.out)
		}

		back := filepath.Join(dir, fn.String())
		wantOutput(t, 0, at("cas", "get", want, back+".txt"))
		wantOutput(t, 0, at("cas", "get", root, back, "--directory"))
		for path, want := range map[string]string{back + ".txt": "alpha", back + "/sub/b.txt": "beta", back + "/sub/link": "alpha"} {
			if b, err := os.ReadFile(path); err != nil || string(b) != want {
				t.Errorf("%v: %s: got %q, %v, want %q", fn, path, b, err, want)
			}
		}
		if fi, err := os.Stat(back + "/sub/b.txt"); err != nil || fi.Mode()&0o111 == 0 {
			t.Errorf("%v: executable: got %v, %v, want it executable", fn, fi, err)
		}

		absent := fn.Sum([]byte("nobody has put this")).String()
		wantOutput(t, 0, at("cas", "stat", want, root), "present")
		wantOutput(t, 4, at("cas", "stat", want, absent), "present", "absent")
		wantOutput(t, 0, at("cas", "verify", want), "sound")
		wantOutput(t, 4, at("cas", "cat", absent), absent)
		wantOutput(t, 4, at("cas", "get", absent, back+".none"), absent)
		if left, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || len(left) > 0 {
			t.Errorf("%v: get: left behind %v, %v, want nothing", fn, left, err)
		}
	}
	var rows []struct{ Path, Kind, Digest string }
	put := wantOutput(t, 0, at("cas", "put", src, "--json"))
	var put1 []struct{ Digest string }
	if err := json.Unmarshal([]byte(put.out), &put1); err != nil || len(put1) != 1 {
		t.Fatalf("put --json: got %q, %v, want one blob", put.out, err)
	}
	tree := wantOutput(t, 0, at("cas", "tree", put1[0].Digest, "--json"))
	if err := json.Unmarshal([]byte(tree.out), &rows); err != nil || len(rows) != 6 {
		t.Errorf("tree --json: got %d rows, %v, want 6:\n%s", len(rows), err, tree.out)
	}
}

// TestCacheShowAndRm checks that a removed result stays absent after a restart and that its action runs again.
func TestCacheShowAndRm(t *testing.T) {
	r := serving(t, "main")
	action, resp := r.execute(t, "echo made > out")
	at := []string{"--cas", r.cas, "--instance", "main"}
	rm := []string{"--dir", r.dir, "--instance", "main"}
	wantOutput(t, 0, append([]string{"cache", "show", action}, at...), "exit code 0", "out ", "0 of them absent", resp.Result.ExecutionMetadata.Worker)
	wantOutput(t, 0, append([]string{"cache", "show", action, "--json"}, at...), `"absent": []`)
	wantOutput(t, 4, []string{"cache", "rm", action, "--dir", r.dir, "--instance", "other"}, "absent")
	wantOutput(t, 0, append([]string{"cache", "rm", action}, rm...), "removed")
	wantOutput(t, 4, append([]string{"cache", "show", action}, at...))
	wantOutput(t, 4, append([]string{"cache", "rm", action}, rm...), "absent")
	if _, again := r.execute(t, "echo made > out"); again.CachedResult {
		t.Error("got the removed result, want a new execution")
	}
	wantOutput(t, 0, append([]string{"cache", "show", action}, at...), "exit code 0")
}
