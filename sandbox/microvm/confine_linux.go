// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// confined returns the command that starts this program under a name, as the first process of namespaces with which
// everything that it starts ends. Its arguments are those of parseUser, then args.
func (b *backend) confined(m *machine, files []*os.File, name string, args ...string) (*exec.Cmd, error) {
	group := ""
	if !b.emulated {
		gids, err := groups(device)
		if err != nil {
			return nil, err
		}
		if len(gids) > 0 {
			group = fmt.Sprint(gids[0])
		}
	}
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // kill ends it
	cmd.Args = append([]string{name, fmt.Sprint(zygote.CommandUser(m.cell.number)), group}, args...)
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.Stdout, cmd.Stderr = &m.console, &m.console
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Setsid:     true, Pdeathsig: unix.SIGKILL,
	}
	return cmd, nil
}

// separateMounts gives the first process of a mount namespace read-only mounts, and a /proc of its pid namespace. In
// this host's, what escapes from a machine would find machines of other workers: they run as the same users.
func separateMounts() error {
	// Slaves, so that a run does not keep mounted what this host unmounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mounts from this host's: %w", err)
	}
	// What escapes leaves nothing in directories in which every user may write.
	readOnly := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &readOnly); err != nil {
		return fmt.Errorf("make mounts read-only: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return nil
}

// A user is what runs a machine.
type user struct {
	id    int
	group int // that may open KVM, or -1
}

// parseUser parses the number of a user, and of its group, if any.
func parseUser(id, group string) (u user, err error) {
	u.group = -1
	if u.id, err = strconv.Atoi(id); err == nil && group != "" {
		u.group, err = strconv.Atoi(group)
	}
	return u, err
}

// become gives up all rights but those of the user and those to the descriptors, of which port is one to the worker.
func (u user) become(port int32) error {
	if err := u.drop(port); err != nil {
		return fmt.Errorf("become user %d: %w", u.id, err)
	}
	return nil
}

func (u user) drop(port int32) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	var supplementary []int
	if u.group >= 0 {
		supplementary = []int{u.group}
	}
	if err := syscall.Setgroups(supplementary); err != nil {
		return err
	}
	if err := syscall.Setgid(u.id); err != nil {
		return err
	}
	if err := syscall.Setuid(u.id); err != nil {
		return err
	}
	// The change of the user has cleared this signal. The worker may have ended before it is set again.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	worker := []unix.PollFd{{Fd: port}}
	if _, err := unix.Poll(worker, 0); err != nil {
		return err
	}
	if worker[0].Revents&unix.POLLHUP != 0 {
		return errors.New("the worker has ended")
	}
	return nil
}
