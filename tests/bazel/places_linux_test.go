// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// places are small writes in unusual places. IN is an input file and OUT the declared output; local and here say
// whether Bazel's local sandbox and Cloister permit the write. docs/sandbox.md has the table.
var places = []struct {
	name, command string
	local, here   bool
}{
	{"new_file_in_working_directory", "echo x > scratch", true, true},
	{"new_file_beside_input", "echo x > $$(dirname IN)/scratch", true, true},
	{"new_directory_beside_input", "mkdir -p $$(dirname IN)/d/e && echo x > $$(dirname IN)/d/e/f", true, true},
	{"new_file_beside_output", "echo x > $$(dirname OUT)/scratch", true, true},
	{"undeclared_output_directory", "mkdir -p bazel-out/other && echo x > bazel-out/other/f", true, true},
	{"symlink_beside_input", "ln -s a.txt $$(dirname IN)/link", true, true},
	{"fifo_in_working_directory", "mkfifo fifo", true, true},
	{"input_appended_to", "echo x >> IN", false, false},
	{"input_truncated", ": > IN", false, false},
	{"input_mode_changed", "chmod 777 IN", false, false},
	{"input_time_changed", "touch -d 2001-01-01 IN", false, false},
	{"input_replaced", "echo x > t && mv -f t IN", true, false},
	{"input_removed", "rm -f IN", true, false},
	{"input_linked", "ln IN hardlink", true, false},
	{"file_in_tmp", "echo x > /tmp/cloister-place && rm /tmp/cloister-place", true, true},
	{"file_in_dev_shm", "echo x > /dev/shm/cloister-place && rm /dev/shm/cloister-place", true, true},
	{"file_in_var_tmp", "echo x > /var/tmp/cloister-place && rm /var/tmp/cloister-place", false, false},
	{"file_in_root", "echo x > /cloister-place && rm /cloister-place", false, false},
	{"file_in_usr", "echo x > /usr/cloister-place && rm /usr/cloister-place", false, false},
	{"file_in_etc", "echo x > /etc/cloister-place && rm /etc/cloister-place", false, false},
	{"file_above_working_directory", "echo x > ../cloister-place && rm ../cloister-place", false, false},
}

// TestWritesInUnusualPlaces compares Bazel's local sandbox with Cloister.
func TestWritesInUnusualPlaces(t *testing.T) {
	r := newRig(t, nil)
	var rules strings.Builder
	for _, p := range places {
		command := strings.NewReplacer("IN", "$<", "OUT", "$@").Replace(p.command)
		fmt.Fprintf(&rules, "genrule(name = %q, srcs = [\"in/a.txt\"], outs = [%q], cmd = %q)\n", p.name, p.name+".txt",
			"if (set -e; "+command+") 2> /dev/null; then echo permitted; else echo refused; fi > $@")
	}
	dir := filepath.Join(r.Workspace, "places")
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "in"), 0o755))
	for name, text := range map[string]string{"BUILD.bazel": rules.String(), "in/a.txt": "a\n"} {
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	build := func(flags ...string) map[string]bool {
		t.Helper()
		if build := r.bazel(t, "build", append(flags, "//places:all")...); build.ExitCode != 0 {
			t.Fatalf("bazel build %v: exit %d, want 0\n%s", flags, build.ExitCode, build.Output)
		}
		out := must.Get(r.Outputs("places"))(t)
		permitted := map[string]bool{}
		for _, p := range places {
			b := must.Get(os.ReadFile(filepath.Join(out, p.name+".txt")))(t)
			permitted[p.name] = string(b) == "permitted\n"
		}
		return permitted
	}
	here := build()
	must.Succeed(t, r.Clean(t.Context()))
	local := build("--remote_executor=", "--spawn_strategy=linux-sandbox")
	for _, p := range places {
		if here[p.name] != p.here || local[p.name] != p.local {
			t.Errorf("%s: permitted in the local sandbox %v, in Cloister %v; want %v, %v",
				p.name, local[p.name], here[p.name], p.local, p.here)
		}
	}
}
