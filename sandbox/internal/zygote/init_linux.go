// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Where the host and the workspace are reached while the root is made. Both are gone before the
// command starts.
const (
	oldRoot   = "/.host"
	workspace = "/.workspace"
)

// commandPID is the process id that a command is to have, high enough to be free.
const commandPID = 100

// initMain is pid 1 of one run. When it exits, however that comes about, the kernel kills every other
// process of its pid namespace before it is reaped.
func initMain() {
	// no_new_privs and the blocked signals belong to a thread and are inherited from the one that forks.
	runtime.LockOSThread()
	unix.CloseOnExec(initPlan)
	unix.CloseOnExec(initControl)
	unix.CloseOnExec(initWorkspace)

	// Runtime threads take process ids; the command's is nearly always the same if the kernel lets us
	// say which comes next (ns_last_pid, a file of checkpoint and restore). Where it does not, or where a
	// thread comes in between, it is some other small number, which no promise depends on.
	lastPID, _ := unix.Open("/proc/sys/kernel/ns_last_pid", unix.O_WRONLY|unix.O_CLOEXEC, 0)

	fail := func(err error) {
		report(initControl, Report{Failed: fmt.Sprintf("%.2000s", err)}) // a packet has room for that
		os.Exit(1)
	}
	if len(os.Args) != 3 {
		fail(errors.New("init was started without its arguments"))
	}
	if err := resetSignals(); err != nil {
		fail(err)
	}
	uid, err := strconv.Atoi(os.Args[1])
	if err != nil {
		fail(err)
	}
	rootless := os.Args[2] == "true"
	var plan Plan
	if err := readPlan(initPlan, &plan); err != nil {
		fail(fmt.Errorf("read plan: %w", err))
	}
	// Before most else, so that its thread has a process id below the command's.
	var term terminator
	go obey(&term)
	if err := name(plan.Loopback); err != nil {
		fail(err)
	}
	if err := makeRoot(&plan); err != nil {
		fail(err)
	}
	if err := restrict(uid); err != nil {
		fail(err)
	}
	// Taken before the start, so that no time of the command is missing.
	started := Report{Started: time.Now().UnixNano()}
	pid, err := startCommand(&plan, uid, rootless, lastPID)
	if err != nil {
		var no *cannotExec
		if !errors.As(err, &no) {
			fail(err)
		}
		fmt.Fprintf(os.Stderr, "cloister: %v\n", no)
		report(initControl, started)
		report(initControl, Report{Exited: &Exited{Code: no.code, At: time.Now().UnixNano()}})
		return
	}
	term.start()
	report(initControl, started)
	report(initControl, Report{Exited: reap(pid)})
}

// readPlan reads the plan from its start, wherever other holders of the descriptor stand.
func readPlan(fd int, into *Plan) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	b := make([]byte, st.Size)
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		if err != nil || m == 0 {
			return fmt.Errorf("short plan: %d of %d bytes: %w", n, len(b), err)
		}
		n += m
	}
	return json.Unmarshal(b, into)
}

// obey does what the worker says. When the worker is gone it ends the run.
func obey(term *terminator) {
	for {
		word, _, err := Receive(initControl)
		if err != nil || string(word) == WordKill {
			os.Exit(1)
		}
		if string(word) == WordTerm {
			term.tell()
		}
	}
}

// A terminator tells every process of the run once that it is to end, whether the word comes before, while or
// after the command is started.
type terminator struct {
	mu            sync.Mutex
	told, started bool
}

// tell is called when the word comes.
func (t *terminator) tell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.told = true
	t.send()
}

// start is called when the command has been started.
func (t *terminator) start() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started = true
	t.send()
}

func (t *terminator) send() {
	if t.told && t.started {
		// From pid 1, -1 is every process of the namespace but pid 1.
		_ = unix.Kill(-1, unix.SIGTERM)
	}
}

// reap waits for orphans and for the command, and returns how the command ended.
func reap(command int) *Exited {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			// The command cannot be waited for, which cannot happen while it is our child.
			return &Exited{Signal: int(unix.SIGKILL), At: time.Now().UnixNano()}
		}
		if pid != command || !ws.Exited() && !ws.Signaled() {
			continue
		}
		e := &Exited{At: time.Now().UnixNano()}
		if ws.Signaled() {
			e.Signal = int(ws.Signal())
		} else {
			e.Code = ws.ExitStatus()
		}
		return e
	}
}

// name gives the run its host name and, if asked for, its loopback interface.
func name(loopback bool) error {
	if err := unix.Sethostname([]byte(Hostname)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := unix.Setdomainname([]byte("(none)")); err != nil {
		return fmt.Errorf("domain name: %w", err)
	}
	if !loopback {
		return nil
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	return nil
}

// makeRoot makes the root that the plan describes, from nothing, and leaves no way back to the host's.
func makeRoot(plan *Plan) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Any directory serves to carry the new root; /proc is sure to exist.
	if err := unix.Mount("root", "/proc", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	if err := os.Mkdir("/proc"+oldRoot, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot("/proc", "/proc"+oldRoot); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if plan.Workspace {
		if err := os.Mkdir(workspace, 0o700); err != nil {
			return err
		}
		err := unix.MoveMount(initWorkspace, "", unix.AT_FDCWD, workspace, unix.MOVE_MOUNT_F_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("attach the workspace: %w", err)
		}
	}
	for i := range plan.Ops {
		if err := plan.Ops[i].do(); err != nil {
			return fmt.Errorf("%s %s: %w", plan.Ops[i].Kind, plan.Ops[i].Target, err)
		}
	}
	detach := []string{oldRoot}
	if plan.Workspace {
		detach = append(detach, workspace)
	}
	for _, dir := range detach {
		// Detaching follows no link and removes no file: what the mounts hold is untouched.
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("detach %s: %w", dir, err)
		}
		if err := unix.Rmdir(dir); err != nil {
			return fmt.Errorf("detach %s: %w", dir, err)
		}
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make the root read-only: %w", err)
	}
	return nil
}

// do makes one part of the root.
func (o *Op) do() error {
	switch o.Kind {
	case OpDir:
		return closed(target(o.Target, true))
	case OpFile:
		if err := closed(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return os.WriteFile(o.Target, []byte(o.Source), 0o444)
	case OpSymlink:
		if err := closed(target(path.Dir(o.Target), true)); err != nil {
			return err
		}
		return os.Symlink(o.Source, o.Target)
	case OpTmpfs:
		if err := closed(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("tmp", o.Target, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=1777,size=%d", o.Bytes))
	case OpProc:
		if err := closed(target(o.Target, true)); err != nil {
			return err
		}
		return unix.Mount("proc", o.Target, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "subset=pid,hidepid=invisible")
	case OpBind:
		return o.bind(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	case OpDevice:
		return o.bind(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC)
	case OpOutput:
		return o.bind(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	}
	return fmt.Errorf("unknown operation")
}

// bind attaches a copy of the mount tree at the source, with attrs added to all of it.
func (o *Op) bind(attrs uint64) error {
	from, rel := oldRoot, strings.TrimPrefix(o.Source, "/")
	if !path.IsAbs(o.Source) {
		from = workspace
	}
	base, err := unix.Open(from, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(base)
	// A link on the way would be read against the wrong root, so there may be none.
	src, err := unix.Openat2(base, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH})
	if err != nil {
		return fmt.Errorf("source %s: %w", o.Source, err)
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	clone := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH)
	if dir {
		clone |= unix.AT_RECURSIVE
	}
	tree, err := unix.OpenTree(src, "", clone)
	if err != nil {
		return fmt.Errorf("copy the mount: %w", err)
	}
	defer unix.Close(tree)
	at := uint(unix.AT_EMPTY_PATH)
	if dir {
		at |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(tree, "", at, &unix.MountAttr{Attr_set: attrs}); err != nil {
		return fmt.Errorf("restrict the mount: %w", err)
	}
	dst, err := target(o.Target, dir)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	if err := unix.MoveMount(tree, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the mount: %w", err)
	}
	return nil
}

// target returns a descriptor of the path, a directory or else a file, which is made with its parents
// if it is absent. It follows no link: an input tree may hold some, and until the host is detached one
// could lead there.
func target(p string, dir bool) (int, error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, p, how)
	if err != unix.ENOENT {
		return fd, err
	}
	parent, err := target(path.Dir(p), true)
	if err != nil {
		return -1, err
	}
	defer unix.Close(parent)
	if dir {
		err = unix.Mkdirat(parent, path.Base(p), 0o755)
	} else {
		err = unix.Mknodat(parent, path.Base(p), unix.S_IFREG|0o444, 0)
	}
	if err != nil {
		return -1, err
	}
	return unix.Openat2(parent, path.Base(p), how)
}

// closed closes a descriptor that was wanted only for being made.
func closed(fd int, err error) error {
	if err == nil {
		unix.Close(fd)
	}
	return err
}

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
