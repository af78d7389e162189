// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"golang.org/x/sys/unix"
)

const (
	msbProgram = "msb"
	// nameDriver is the name under which this program drives msb for one machine, as the first process of a pid namespace.
	nameDriver = "cloister-msb"
	// driverDir is where the driver mounts its tmpfs, in a mount namespace of its own.
	driverDir = "/mnt"
	// guestProgram is this program in the guest, where msb runs it.
	guestProgram = "/cloister-msb-guest"
	// guestName is the name of every machine's sandbox. Each machine has its own msb state, so names do not collide.
	guestName = "cloister"
)

// An msb is an installed msb and what it calls the option for a sandbox without network.
type msb struct{ path, noNetwork string }

// findMSB returns the msb of $MSB_PATH or PATH, if it is one that this package can use. Each of its answers may take as
// long as limit.
func findMSB(ctx context.Context, limit time.Duration) (msb, error) {
	stated := os.Getenv("MSB_PATH")
	file, err := exec.LookPath(cmp.Or(stated, msbProgram))
	if err == nil {
		file, err = filepath.Abs(file)
	}
	if err == nil {
		file, err = filepath.EvalSymlinks(file) // the library is found relative to the program
	}
	if err != nil {
		return msb{}, preflight.Fail(preflight.MSBNotFound, "msb not found: MSB_PATH is %q: %v; install @superradcompany/microsandbox-linux-x64-gnu, which npm "+
			"omits with a version of node below 22", stated, err)
	}
	version, err := askMSB(ctx, limit, file, "--version")
	if err != nil {
		return msb{}, err
	}
	v := regexp.MustCompile(`\b(\d+)\.(\d+)\.\d+`).FindStringSubmatch(version)
	if v == nil || v[1] != "0" || v[2] != "6" && v[2] != "7" {
		return msb{}, preflight.Fail(preflight.MSBVersion, "%s: version %.80q is not supported: install msb 0.6 or 0.7", file, strings.TrimSpace(version))
	}
	if found, err := filepath.Glob(filepath.Join(filepath.Dir(file), "../lib/libkrunfw.so*")); err != nil || len(found) == 0 {
		return msb{}, preflight.Fail(preflight.MSBKrunfw, "no lib/libkrunfw.so beside the directory of %s: its virtual machines have no kernel; install the whole package", file)
	}
	help, err := askMSB(ctx, limit, file, "create", "--help")
	if err != nil {
		return msb{}, err
	}
	for _, option := range []string{"--no-net", "--no-network"} {
		if regexp.MustCompile(option + `\b[^-]`).MatchString(help) {
			return msb{file, option}, nil
		}
	}
	return msb{}, preflight.Fail(preflight.MSBFlag, "%s create has neither --no-net nor --no-network, without which actions would have a network; install msb 0.6 or 0.7", file)
}

// askMSB runs msb with arguments that start no machine, and returns its output.
func askMSB(ctx context.Context, limit time.Duration, file string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var out, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, file, args...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = []string{"MSB_HOME=/nonexistent", "HOME=/nonexistent"}, "/", &out, &stderr, time.Second
	err := cmd.Run()
	text := strings.TrimSpace(stderr.String())
	text = text[:min(len(text), maxError)]
	switch {
	case err == nil:
		return out.String(), nil
	case strings.Contains(text, "msb binary not found"):
		return "", preflight.Fail(preflight.MSBShim, "%s is the launcher of the npm package, whose platform package is missing; set MSB_PATH to bin/msb in "+
			"@superradcompany/microsandbox-linux-x64-gnu", file)
	}
	return "", preflight.Fail(preflight.MSBNotStarted, "%s %s: %v: %s; it may need a newer C library, or libcap-ng.so.0", file, strings.Join(args, " "), err, text)
}

// msbCommand returns the command that runs a machine in msb with the guest's ends of its ports: this program as
// driverMain.
func (b *backend) msbCommand(m *machine, theirs []*os.File) (*exec.Cmd, error) {
	return b.confined(m, theirs, nameDriver, b.program, b.noNet, fmt.Sprintf("%dM", b.memory>>20))
}

// firstPort is the driver's descriptor of the first port; the others follow.
const firstPort = 3

// A driver runs msb for one machine.
type driver struct {
	user
	msb    msb
	memory string
}

// driverMain is the first process of the namespaces of a machine. It has the arguments of msbCommand.
func driverMain() error {
	runtime.LockOSThread() // no_new_privs is an attribute of a thread
	if len(os.Args) != 6 {
		return fmt.Errorf("got arguments %q", os.Args)
	}
	u, err := parseUser(os.Args[1], os.Args[2])
	if err != nil {
		return err
	}
	d := driver{user: u, msb: msb{os.Args[3], os.Args[4]}, memory: os.Args[5]}
	var theirs []*os.File
	for i := range ports {
		fd := firstPort + i
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("port %d: %w", i, err)
		}
		theirs = append(theirs, os.NewFile(uintptr(fd), portName(i)))
	}
	if err := d.prepare(); err != nil {
		return err
	}
	if err := d.become(firstPort); err != nil {
		return err
	}
	return d.run(theirs)
}

// prepare makes the directories of msb: its state, and the root of the guest with this program.
func (d *driver) prepare() error {
	if err := separateMounts(); err != nil {
		return err
	}
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	// The guest may fill it. Its pages count for the control group of the machine.
	size := int64(len(program)) + 128<<20
	data := fmt.Sprintf("mode=0755,uid=%d,gid=%d,size=%d,nr_inodes=%d", d.id, d.id, size, 64<<10)
	if err := unix.Mount("cloister", driverDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", driverDir, err)
	}
	root := filepath.Join(driverDir, "root")
	for _, dir := range []string{"dev", "proc", "sys", "tmp", "run", hostDir, "etc"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	home := filepath.Join(driverDir, "home")
	return errors.Join(os.WriteFile(filepath.Join(root, guestProgram), program, 0o755),
		os.Mkdir(home, 0o700), os.Chown(home, d.id, d.id), os.Chown(root, d.id, d.id))
}

// run creates the sandbox and runs the guest in it, whose stdin and stdout carry all ports.
func (d *driver) run(theirs []*os.File) error {
	create := d.command("create", "-n", guestName, "-q", "--pull", "never", d.msb.noNetwork,
		"-c", fmt.Sprint(processors), "-m", d.memory, filepath.Join(driverDir, "root"))
	create.Stdout = os.Stderr
	if err := create.Run(); err != nil {
		return fmt.Errorf("msb create: %w%s", err, d.logs())
	}
	exec := d.command("exec", "-q", "--no-tty", "--stream", guestName, "--", guestProgram)
	to, err := exec.StdinPipe()
	if err != nil {
		return err
	}
	from, err := exec.StdoutPipe()
	if err != nil {
		return err
	}
	if err := exec.Start(); err != nil {
		return fmt.Errorf("msb exec: %w", err)
	}
	err = bridge(from, to, theirs)
	_ = exec.Process.Kill() // or it has ended
	return fmt.Errorf("msb exec: %w%s", errors.Join(err, exec.Wait()), d.logs())
}

// command returns a command of msb.
func (d *driver) command(args ...string) *exec.Cmd {
	cmd := exec.Command(d.msb.path, args...) //nolint:noctx // ends with the pid namespace
	home := filepath.Join(driverDir, "home")
	cmd.Env = []string{"HOME=" + home, "MSB_HOME=" + home, "TMPDIR=" + home, "PATH=/usr/bin:/bin"}
	cmd.Dir, cmd.Stderr = home, os.Stderr
	return cmd
}

// logs returns what msb recorded about the system of the sandbox.
func (d *driver) logs() string {
	var text console
	cmd := d.command("logs", "--source", "system", guestName)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &text, nil, time.Second
	if cmd.Start() != nil {
		return ""
	}
	timer := time.AfterFunc(logsTime, func() { _ = cmd.Process.Kill() }) // or it has ended
	defer timer.Stop()
	_ = cmd.Wait() // the text tells
	if text.String() == "" {
		return ""
	}
	return "\n" + text.String()
}

// logsTime is how long msb may take to print its logs.
const logsTime = 5 * time.Second

// msbGuestMain is the guest in a machine of msb: it finds its ports in stdin and stdout.
func msbGuestMain() error {
	if err := errors.Join(mountAll(), harden(), checkNoNetwork("/sys/class/net")); err != nil {
		return err
	}
	g := newGuest()
	var ends []*os.File
	for i := range ports {
		ours, theirs, err := socketPair(portName(i))
		if err != nil {
			return err
		}
		g.ports[i] = newPort(ours)
		ends = append(ends, theirs)
	}
	in, out, err := takeStreams()
	if err != nil {
		return err
	}
	failed := make(chan error, 2)
	go func() { failed <- bridge(in, out, ends) }()
	go func() { failed <- g.work() }()
	return <-failed
}

// checkNoNetwork returns an error if an interface in the directory has a device: msb may understand its option for no
// network in another way.
func checkNoNetwork(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch _, err := os.Lstat(filepath.Join(dir, e.Name(), "device")); {
		case err == nil:
			return fmt.Errorf("msb has given the machine a network device: %s", e.Name())
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR): // bonding_masters is a file
			return err
		}
	}
	return nil
}

// takeStreams returns stdin and stdout, and replaces them for everything else in this process and for its children.
func takeStreams() (in, out *os.File, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, nil, err
	}
	defer null.Close()
	var taken [2]int
	for i, replacement := range []int{int(null.Fd()), 2} {
		if taken[i], err = unix.FcntlInt(uintptr(i), unix.F_DUPFD_CLOEXEC, 3); err == nil {
			err = unix.Dup3(replacement, i, 0)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("stream %d: %w", i, err)
		}
	}
	return os.NewFile(uintptr(taken[0]), "stdin"), os.NewFile(uintptr(taken[1]), "stdout"), nil
}
