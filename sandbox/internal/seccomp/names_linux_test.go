// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestNames compares the names of all architectures with the constants of x/sys/unix.
func TestNames(t *testing.T) {
	dir := must.Get(exec.Command("go", "list", "-f", "{{.Dir}}", "golang.org/x/sys/unix").Output())(t)
	constant := regexp.MustCompile(`\tSYS_(\w+) += (\d+)`)
	for name, a := range architectures {
		source := must.Get(os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "zsysnum_linux_"+name+".go")))(t)
		want := map[string]string{}
		for _, m := range constant.FindAllStringSubmatch(string(source), -1) {
			want[m[2]] = strings.ToLower(m[1])
		}
		delete(want, map[string]string{"arm64": "244"}[name]) // ARCH_SPECIFIC_SYSCALL, which is no call
		for nr, got := range a.names() {
			if w := want[fmt.Sprint(nr)]; got != w {
				t.Errorf("%s: call %d is named %q, want %q", name, nr, got, w)
			}
			delete(want, fmt.Sprint(nr))
		}
		expect.That(t, len(want) == 0, "%s: the calls %v have no name", name, want)
	}
}
