// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// Signal sends sig to the processes of this host whose command line contains mark and that handle it, and returns their
// number. A shell's child that has not yet executed its program has the shell's command line and no handler; it would
// die.
func Signal(t testing.TB, mark string, sig syscall.Signal) int {
	t.Helper()
	sent := 0
	for _, p := range Running(t, mark) {
		pid := must.Get(strconv.Atoi(strings.Split(p, "/")[2]))(t)
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // it has ended
		}
		_, caught, _ := strings.Cut(string(status), "\nSigCgt:")
		caught, _, _ = strings.Cut(caught, "\n")
		mask, err := strconv.ParseUint(strings.TrimSpace(caught), 16, 64)
		if err != nil {
			t.Fatalf("%s: caught signals: %v", p, err)
		}
		if mask&(1<<(sig-1)) == 0 {
			continue
		}
		must.Succeed(t, syscall.Kill(pid, sig))
		sent++
	}
	return sent
}
