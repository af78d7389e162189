// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// commandPID is the process id that a command is to have, high enough to be free.
const commandPID = 100

// Limits of every run (getrlimit(2)); all others are the worker's own.
var limits = []struct {
	resource int
	value    uint64
}{
	{unix.RLIMIT_CORE, 0},
	{unix.RLIMIT_NOFILE, 65536},
	{unix.RLIMIT_MEMLOCK, 64 << 10},
}

// restrict sets what the command inherits from this thread and process. It owns its output pipes, so
// that it can open them again as /dev/stdout.
func restrict(uid int) error {
	unix.Umask(0o022)
	for _, fd := range []int{1, 2} {
		if err := unix.Fchown(fd, uid, uid); err != nil {
			return fmt.Errorf("owner of the output: %w", err)
		}
	}
	for _, l := range limits {
		var cur syscall.Rlimit
		if err := syscall.Getrlimit(l.resource, &cur); err != nil {
			return fmt.Errorf("resource limit %d: %w", l.resource, err)
		}
		v := min(l.value, cur.Max)
		if l.resource == unix.RLIMIT_NOFILE {
			// The limit also bounds a user's descriptors on their way through sockets, of which the
			// zygote must have some left where it is the same user.
			v = min(l.value, cur.Max/2)
		}
		if err := syscall.Setrlimit(l.resource, &syscall.Rlimit{Cur: v, Max: v}); err != nil {
			return fmt.Errorf("resource limit %d: %w", l.resource, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	return nil
}

// cannotExec says that the program is the reason why there is no process.
type cannotExec struct {
	code int
	text string
}

func (e *cannotExec) Error() string { return e.text }

// startCommand starts the command as the one user of a new user namespace, in which it has no
// capability once it executes, in a session of its own.
func startCommand(plan *Plan, uid int, rootless bool, lastPID int) (int, error) {
	if st, err := os.Stat(plan.Dir); err != nil || !st.IsDir() {
		return 0, fmt.Errorf("working directory %s: not a directory of the sandbox", plan.Dir)
	}
	prog, err := find(plan)
	if err != nil {
		return 0, err
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open /dev/null: %w", err)
	}
	attr := &syscall.ProcAttr{
		Dir:   plan.Dir,
		Env:   plan.Env,
		Files: []uintptr{uintptr(null), 1, 2},
		Sys: &syscall.SysProcAttr{
			Setsid:      true,
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: UID, HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: GID, HostID: uid, Size: 1}},
			// Where the kernel forbids setgroups the run keeps the calling user's groups, which
			// own nothing that it can see.
			GidMappingsEnableSetgroups: !rootless,
			Credential:                 &syscall.Credential{Uid: UID, Gid: GID, NoSetGroups: rootless},
		},
	}
	if lastPID >= 0 {
		_, _ = unix.Write(lastPID, []byte(strconv.Itoa(commandPID-1)))
	}
	pid, err := syscall.ForkExec(prog, plan.Args, attr)
	switch {
	case err == nil:
		return pid, nil
	case err == syscall.ENOENT:
		return 0, &cannotExec{127, fmt.Sprintf("%s: its interpreter was not found in the sandbox", plan.Args[0])}
	case slices.Contains(execErrors, err):
		return 0, &cannotExec{126, fmt.Sprintf("%s: cannot be executed: %v", plan.Args[0], err)}
	}
	return 0, fmt.Errorf("user namespace and start of %s: %w", plan.Args[0], err)
}

// execErrors are how execve(2) says that a file cannot be executed. What making a user namespace fails
// with is not among them.
var execErrors = []error{
	syscall.EACCES, syscall.ENOEXEC, syscall.ETXTBSY, syscall.ENOTDIR, syscall.ELOOP, syscall.E2BIG, syscall.ELIBBAD,
	syscall.EISDIR, syscall.EIO, syscall.EINVAL, syscall.ENAMETOOLONG,
}

// find returns the path of the program: as it is if it has a slash, relative to the working directory;
// else the first executable file of that name in the directories of PATH.
func find(plan *Plan) (string, error) {
	name := plan.Args[0]
	var tries []string
	if strings.Contains(name, "/") {
		tries = []string{name}
	} else {
		for _, kv := range plan.Env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				for dir := range strings.SplitSeq(list, ":") {
					tries = append(tries, path.Join(dir, name))
				}
			}
		}
	}
	var found string
	for _, p := range tries {
		abs := p
		if !path.IsAbs(p) {
			abs = path.Join(plan.Dir, p)
		}
		st, err := os.Stat(abs)
		if err != nil {
			continue
		}
		if st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			// The working directory is entered before the program is looked up again.
			return p, nil
		}
		found = p
	}
	if found != "" {
		return "", &cannotExec{126, fmt.Sprintf("%s: is not an executable file", name)}
	}
	return "", &cannotExec{127, fmt.Sprintf("%s: not found in the sandbox", name)}
}
