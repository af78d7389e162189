// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// places are small writes in unusual places. IN is an input file and OUT the declared output; local and here say
// whether Bazel's local sandbox and Cloister permit the write. The table of docs/sandbox.md has a row for each.
var places = []struct {
	write, command string
	local, here    bool
}{
	{"new file in the working directory", "echo x > scratch", true, true},
	{"new file beside an input", "echo x > $$(dirname IN)/scratch", true, true},
	{"new directory beside an input", "mkdir -p $$(dirname IN)/d/e && echo x > $$(dirname IN)/d/e/f", true, true},
	{"new file beside an output", "echo x > $$(dirname OUT)/scratch", true, true},
	{"new undeclared output directory", "mkdir -p bazel-out/other && echo x > bazel-out/other/f", true, true},
	{"new symlink beside an input", "ln -s a.txt $$(dirname IN)/link", true, true},
	{"new FIFO in the working directory", "mkfifo fifo", true, true},
	{"append to an input", "echo x >> IN", false, false},
	{"truncate an input", ": > IN", false, false},
	{"change an input's mode", "chmod 777 IN", false, false},
	{"change an input's modification time", "touch -d 2001-01-01 IN", false, false},
	{"replace an input", "echo x > t && mv -f t IN", true, false},
	{"remove an input", "rm -f IN", true, false},
	{"hard-link an input", "ln IN hardlink", true, false},
	{"new file in `/tmp`", "echo x > /tmp/cloister-place && rm /tmp/cloister-place", true, true},
	{"new file in `/dev/shm`", "echo x > /dev/shm/cloister-place && rm /dev/shm/cloister-place", true, true},
	{"new file in `/var/tmp`", "echo x > /var/tmp/cloister-place && rm /var/tmp/cloister-place", false, false},
	{"new file in `/`", "echo x > /cloister-place && rm /cloister-place", false, false},
	{"new file in `/usr`", "echo x > /usr/cloister-place && rm /usr/cloister-place", false, false},
	{"new file in `/etc`", "echo x > /etc/cloister-place && rm /etc/cloister-place", false, false},
	{"new file above the working directory", "echo x > ../cloister-place && rm ../cloister-place", false, false},
}

// TestDocumentListsWrites compares the table of docs/sandbox.md with places.
func TestDocumentListsWrites(t *testing.T) {
	const document, begin = "../../docs/sandbox.md", "| Write | local sandbox | Cloister |\n|---|---|---|\n"
	answer := map[bool]string{true: "yes", false: "no"}
	var want []string
	for _, p := range places {
		want = append(want, fmt.Sprintf("| %s | %s | %s |", p.write, answer[p.local], answer[p.here]))
	}
	_, table, found := strings.Cut(string(must.Get(os.ReadFile(document))(t)), begin)
	must.Be(t, found, "%s lacks the table", document)
	table, _, _ = strings.Cut(table, "\n\n")
	expect.Slices(t, strings.Split(table, "\n"), want, "table of "+document)
}

// TestWritesInUnusualPlaces compares Bazel's local sandbox with Cloister.
func TestWritesInUnusualPlaces(t *testing.T) {
	r := newRig(t, nil)
	var rules strings.Builder
	rule := func(i int) string { return fmt.Sprintf("place%d", i) }
	for i, p := range places {
		command := strings.NewReplacer("IN", "$<", "OUT", "$@").Replace(p.command)
		fmt.Fprintf(&rules, "genrule(name = %q, srcs = [\"in/a.txt\"], outs = [%q], cmd = %q)\n", rule(i), rule(i)+".txt",
			"if (set -e; "+command+") 2> /dev/null; then echo permitted; else echo refused; fi > $@")
	}
	dir := filepath.Join(r.Workspace, "places")
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "in"), 0o755))
	for name, text := range map[string]string{"BUILD.bazel": rules.String(), "in/a.txt": "a\n"} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	build := func(flags ...string) []bool {
		t.Helper()
		if build := r.bazel(t, "build", append(flags, "//places:all")...); build.ExitCode != 0 {
			t.Fatalf("bazel build %v: exit %d, want 0\n%s", flags, build.ExitCode, build.Output)
		}
		out := must.Get(r.Outputs("places"))(t)
		permitted := make([]bool, len(places))
		for i := range places {
			b := must.Get(os.ReadFile(filepath.Join(out, rule(i)+".txt")))(t)
			permitted[i] = string(b) == "permitted\n"
		}
		return permitted
	}
	here := build()
	must.Succeed(t, r.Clean(t.Context()))
	local := build("--remote_executor=", "--spawn_strategy=linux-sandbox")
	for i, p := range places {
		if here[i] != p.here || local[i] != p.local {
			t.Errorf("%s: permitted in the local sandbox %v, in Cloister %v; want %v, %v",
				p.write, local[i], here[i], p.local, p.here)
		}
	}
}
