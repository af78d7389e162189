// SPDX-License-Identifier: Apache-2.0

package proctree

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

const withoutFirstThread = "PROCTREE_TEST_CHILD"

func init() {
	if os.Getenv(withoutFirstThread) != "" {
		runtime.LockOSThread() // the first
	}
}

func TestMain(m *testing.M) {
	if os.Getenv(withoutFirstThread) != "" {
		go func() {
			time.Sleep(time.Hour)
			os.Exit(1)
		}()
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // ends the thread only
	}
	os.Exit(m.Run())
}

// TestProcessOutlivesItsFirstThread: it is listed while another thread lives, though the kernel calls it a zombie, and
// not after its end.
func TestProcessOutlivesItsFirstThread(t *testing.T) {
	child := exec.CommandContext(t.Context(), "/proc/self/exe")
	child.Env = append(os.Environ(), withoutFirstThread+"=1")
	must.Succeed(t, child.Start())
	listed := func() bool {
		tree := must.Get(Of(os.Getpid()))(t)
		return slices.ContainsFunc(tree, func(p Process) bool { return p.PID == child.Process.Pid })
	}
	must.Hold(t, "the first thread ends", func() bool {
		stat := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/stat", child.Process.Pid)))(t)
		return strings.Contains(string(stat), ") Z ")
	})
	must.Be(t, listed(), "the process is not listed")
	must.Succeed(t, child.Process.Kill())
	must.Hold(t, "the process ends", func() bool { return !listed() })
	_ = child.Wait() // it was killed
}

// TestUnreadableProcessIsAnError: a caller that waits for processes to end must not mistake an error for their end.
func TestUnreadableProcessIsAnError(t *testing.T) {
	proc := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(proc, "11"), 0o755)) // its process has just ended
	expect.Equal(t, len(must.Get(read(proc, 10))(t)), 1, "processes")
	must.Succeed(t, os.MkdirAll(filepath.Join(proc, "12/stat"), 0o755))
	expect.Error(t, expect.Err(read(proc, 10)), unix.EISDIR, "a process that cannot be read")
	expect.Error(t, expect.Err(read("/proc/self/stat", 10)), unix.ENOTDIR, "a list that cannot be read")
}
