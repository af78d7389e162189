// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/cloister-build/cloister/sandbox/internal/agent"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// answerSeconds is how long the worker waits for an answer of the zygote.
const answerSeconds = 30

// ownsUsers reports whether this process is root and has two users for each slot; containers may have fewer.
func ownsUsers() bool {
	if os.Geteuid() != 0 {
		return false
	}
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		b, err := os.ReadFile(file)
		if err != nil || !covers(string(b), zygote.FirstUID, zygote.LastUID) {
			return false
		}
	}
	return true
}

// covers reports whether one line of a user namespace's ID map has all IDs from first to last. A line is the first ID
// inside, the first outside and the count (user_namespaces(7)).
func covers(idMap string, first, last int) bool {
	for line := range strings.Lines(idMap) {
		var inside, outside, n int
		if _, err := fmt.Sscan(line, &inside, &outside, &n); err == nil && inside <= first && last < inside+n {
			return true
		}
	}
	return false
}

// errHelper means that a helper process did not start although this host may support namespaces.
var errHelper = errors.New("the sandbox's helper process did not start")

func initHelper() {
	zygote.Main()
	agent.Main()
}

// startZygote starts a zygote and returns its process and the worker's end of its socket, which the caller closes to
// end it. A rootless zygote lives in a user namespace whose root is the calling user.
func startZygote(rootless bool) (*os.Process, int, error) {
	if !zygote.Callable() {
		return nil, -1, fmt.Errorf("%w: this program must call namespace.Init first in main", errHelper)
	}
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socket pair: %w", err)
	}
	// An unresponsive zygote must not hang the worker.
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(sv[0], unix.SOL_SOCKET, option, &unix.Timeval{Sec: answerSeconds}); err != nil {
			return nil, -1, fmt.Errorf("socket pair: %w", err)
		}
	}
	theirs := os.NewFile(uintptr(sv[1]), "zygote socket")
	defer theirs.Close()
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // no run's context ends the zygote
	cmd.Args = []string{zygote.Name, zygote.Root}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	// A terminal's Ctrl-C is for the worker, which drains; the session shields the zygote.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUTS, Setsid: true}
	if rootless {
		cmd.Args[1] = zygote.Rootless
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		unix.Close(sv[0])
		return nil, -1, fmt.Errorf("start the zygote: %w", err)
	}
	theirs.Close()
	// The first packet reports whether it is ready.
	b, _, err := zygote.Receive(sv[0])
	if err == nil && len(b) > 1 {
		err = fmt.Errorf("start the zygote: %s", b[1:])
	} else if err != nil {
		err = fmt.Errorf("%w: %w; it runs the program's init functions with an empty environment", errHelper, err)
	}
	if err != nil {
		unix.Close(sv[0])
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, -1, err
	}
	return cmd.Process, sv[0], nil
}
