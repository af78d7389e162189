// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"golang.org/x/sys/unix"
)

// Names under which this program is the guest's init and its worker. Init mounts what the worker needs and reaps
// processes. The worker runs commands with package namespace.
const (
	nameInit   = "/cloister-init"
	nameWorker = "cloister-guest"
	// hostDir has the directories of the host by number.
	hostDir = "/host"
)

// A request to the guest has one field.
type request struct {
	Probe bool        `json:",omitempty"`
	Run   *runRequest `json:",omitempty"`
	Stop  bool        `json:",omitempty"` // ends the run as the end of its context does
}

// A runRequest is a run whose absolute sources are in hostDir. Its workspace, if any, follows on portTree, and its
// stdin on portStdout.
type runRequest struct {
	Spec         sandbox.Spec
	Bytes, Files int64 // limits of the workspace
	Stdin        bool  // there is one; its stream ends in any case
	Same         bool  // stdout and stderr are one stream
}

// An answer of the guest. The outputs follow on portTree if there is a result, and end there in any case if there is a
// workspace.
type answer struct {
	Features *sandbox.Features `json:",omitempty"`
	Result   *sandbox.Result   `json:",omitempty"`
	Took     time.Duration     // of the command
	Error    string            `json:",omitempty"`
	Kind     string            `json:",omitempty"` // of the error
}

// errorKinds are the errors that keep their meaning on the way out of the guest.
var errorKinds = map[string]error{
	"unsupported": sandbox.ErrUnsupported, "spec": sandbox.ErrSpec, "missing": fs.ErrNotExist,
}

// kindStopped is the kind of the error of a run that was stopped before its command started.
const kindStopped = "stopped"

func errorAnswer(err error) answer {
	a := answer{Error: err.Error()}
	for kind, target := range errorKinds {
		if errors.Is(err, target) {
			a.Kind = kind
		}
	}
	if errors.Is(err, context.Canceled) {
		a.Kind = kindStopped
	}
	return a
}

// The kernel starts this program without flags or anything else that leads to main.
func init() { //nolint:gochecknoinits // as in package earlyinit
	var err error
	switch {
	case os.Args[0] == nameInit && os.Getpid() == 1:
		namespace.Init()
		err = initMain()
	case os.Args[0] == nameWorker && os.Getppid() == 1:
		namespace.Init()
		err = workerMain()
	case os.Args[0] == nameQEMU && os.Getpid() == 1:
		err = qemuMain()
	case os.Args[0] == nameDriver && os.Getpid() == 1:
		err = driverMain()
	case os.Args[0] == guestProgram:
		namespace.Init()
		err = msbGuestMain()
	default:
		return
	}
	fmt.Fprintln(os.Stderr, err)
	if os.Args[0] == nameInit {
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	os.Exit(1)
}

// mounts of a guest.
var mounts = []struct{ kind, target, data string }{
	{"devtmpfs", "/dev", ""},
	{"proc", "/proc", ""},
	{"sysfs", "/sys", ""},
	{"cgroup2", "/sys/fs/cgroup", ""},
	{"tmpfs", "/tmp", "mode=1777"},
	{"tmpfs", "/run", "mode=755"},
}

func mountAll() error {
	for _, m := range mounts {
		err := unix.Mount(m.kind, m.target, m.kind, unix.MS_NOSUID, m.data)
		if err != nil && err != unix.EBUSY { // msb has mounted it
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return nil
}

// harden sets what an action inherits from its kernel and its parents, in machines of both engines.
func harden() error {
	for name, value := range map[string]string{"fs/protected_hardlinks": "1", "fs/protected_symlinks": "1", "kernel/panic_on_oops": "1"} {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	const files = 1 << 20
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
}

// initMain is the first process of the guest.
func initMain() error {
	if err := initramfs.Prepare(); err != nil {
		return err
	}
	if err := errors.Join(mountAll(), harden()); err != nil {
		return err
	}
	worker, err := syscall.ForkExec("/proc/self/exe", []string{nameWorker}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"PATH=/", "TMPDIR=/tmp"}, Files: []uintptr{0, 1, 2},
	})
	if err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && pid == worker {
			return fmt.Errorf("the guest's worker ended with status %#x", int(status))
		}
		if err != nil && err != unix.EINTR {
			return err
		}
	}
}

// A guest runs commands.
type guest struct {
	ports    [ports]*port
	backend  *namespace.Backend
	features *sandbox.Features
	requests chan *request
	stops    chan struct{}
}

func newGuest() *guest {
	return &guest{backend: namespace.New(namespace.Config{}), requests: make(chan *request), stops: make(chan struct{})}
}

// workerMain is the guest in a machine of QEMU.
func workerMain() error {
	g := newGuest()
	for i := range ports {
		p, err := openPort(portName(i))
		if err != nil {
			return err
		}
		g.ports[i] = p
	}
	return g.work()
}

// work runs commands one at a time until the host is gone.
func (g *guest) work() error {
	if err := g.mountHost(); err != nil {
		return fmt.Errorf("mount the host's directories: %w", err)
	}
	if err := g.ports[portControl].sendMessage(answer{}); err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- g.receive() }()
	for {
		select {
		case err := <-failed:
			return err
		case r := <-g.requests:
			if err := g.serve(r); err != nil {
				return err
			}
		}
	}
}

// receive receives requests. No other run follows one that the host stops.
func (g *guest) receive() error {
	for {
		var r request
		if err := g.ports[portControl].receiveMessage(&r, maxMessage); err != nil {
			return fmt.Errorf("receive requests: %w", err)
		}
		if r.Stop {
			close(g.stops)
			continue
		}
		g.requests <- &r
	}
}

// openPort opens a serial port, which appears a moment after its driver.
func openPort(name string) (*port, error) {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		found, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, file := range found {
			if text, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(text)) != name {
				continue
			}
			f, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(file)), os.O_RDWR, 0)
			if err != nil {
				break // its device is about to appear
			}
			return newPort(f), awaitHost(f)
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no serial port %s", name)
		}
	}
}

// awaitHost waits until the other end of a port is open: before that, reads return EOF.
func awaitHost(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	for open := false; !open; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) { // the host's worker was killed before this machine could be
			return errors.New("the host does not open its serial ports")
		}
		err := raw.Control(func(fd uintptr) {
			poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			_, err := unix.Poll(poll, 0)
			open = err == nil && poll[0].Revents&unix.POLLHUP == 0
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// mountHost mounts the host's directories with FUSE, and forwards requests and answers between the kernel and the
// host's file server.
func (g *guest) mountHost() error {
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", fuse)
	if err := unix.Mount("cloister", hostDir, "fuse", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return err
	}
	go g.passRequests(fuse)
	go g.passAnswers(fuse)
	return nil
}

func (g *guest) passRequests(fuse int) {
	buf := make([]byte, maxRequest)
	for {
		n, err := unix.Read(fuse, buf)
		switch err {
		case nil:
			_, err = g.ports[portFiles].file.Write(buf[:n])
		case unix.EINTR, unix.ENOENT: // interrupted before it was read
			continue
		}
		if err != nil {
			fmt.Println("files of the host:", err)
			os.Exit(1)
		}
	}
}

func (g *guest) passAnswers(fuse int) {
	in := g.ports[portFiles].in
	buf := make([]byte, outHeader+maxRead)
	for {
		_, err := io.ReadFull(in, buf[:4])
		if n := int(uint32(buf[0]) | uint32(buf[1])<<8 | uint32(buf[2])<<16 | uint32(buf[3])<<24); err == nil {
			if n < outHeader || n > len(buf) {
				err = fmt.Errorf("an answer of %d bytes", n)
			} else if _, err = io.ReadFull(in, buf[4:n]); err == nil {
				// ENOENT: the request was interrupted.
				if _, err = unix.Write(fuse, buf[:n]); err == unix.ENOENT {
					err = nil
				}
			}
		}
		if err != nil {
			fmt.Println("files of the host:", err)
			os.Exit(1)
		}
	}
}

// serve performs a request. Its error is one of the ports.
func (g *guest) serve(r *request) error {
	control := g.ports[portControl]
	if r.Probe {
		f, err := g.backend.Probe(context.Background())
		if err != nil {
			return control.sendMessage(errorAnswer(err))
		}
		g.features = &f
		return control.sendMessage(answer{Features: &f})
	}
	if r.Run == nil {
		return errors.New("an empty request")
	}
	return g.run(r.Run)
}

// run runs a command. Every stream and tree ends, whatever fails.
func (g *guest) run(r *runRequest) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-g.stops:
			cancel()
		case <-done:
		}
	}()
	w, err := g.workspace(ctx, r)
	if err != nil {
		return err
	}
	if w.Workspace != nil {
		defer w.Close()
	}
	stdin, drained, err := g.stdin()
	if err != nil {
		return err
	}
	a := g.perform(ctx, r, w, stdin)
	stdin.Close()
	for _, i := range []int{portStdout, portStderr} {
		if err := g.ports[i].end(); err != nil {
			return err
		}
	}
	if err := g.ports[portControl].sendMessage(a); err != nil {
		return err
	}
	if w.Workspace != nil {
		var dirs []string
		for _, o := range r.Spec.Outputs {
			if a.Result != nil {
				dirs = append(dirs, o.Source)
			}
		}
		if err := sendTree(g.ports[portTree], w.fd, dirs); err != nil {
			return err
		}
	}
	return <-drained
}

// A filled is a workspace with the files that the host sent.
type filled struct {
	sandbox.Workspace
	fd  int
	err error // why it is not filled
}

func (f *filled) Close() error { return errors.Join(unix.Close(f.fd), f.Workspace.Close()) }

// workspace makes the workspace of a run and fills it from the port.
func (g *guest) workspace(ctx context.Context, r *runRequest) (*filled, error) {
	if r.Spec.Workspace == "" {
		return &filled{}, nil
	}
	w, err := g.backend.Workspace(context.WithoutCancel(ctx), r.Bytes, r.Files)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(w.Name(), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	r.Spec.Workspace = w.Name()
	treeErr, err := receiveTree(g.ports[portTree], fd, []string{"."}, receipt{-1, -1})
	return &filled{w, fd, treeErr}, err
}

// stdin returns the read end of a pipe with the run's stdin, and a channel that receives the port's error when the
// stream has ended.
func (g *guest) stdin() (*os.File, <-chan error, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	drained := make(chan error, 1)
	go func() {
		_, err := g.ports[portStdout].copyTo(write) // the run may not read it
		write.Close()
		drained <- err
	}()
	return read, drained, nil
}

// perform runs the command.
func (g *guest) perform(ctx context.Context, r *runRequest, w *filled, stdin *os.File) answer {
	if w.err != nil {
		return errorAnswer(fmt.Errorf("copy the workspace into the virtual machine: %w", w.err))
	}
	if r.Spec.Conditions != (sandbox.Conditions{}) && g.features == nil { // a probe finds the supported conditions
		f, err := g.backend.Probe(ctx)
		if err != nil {
			return errorAnswer(err)
		}
		g.features = &f
	}
	std := sandbox.Stdio{Stdout: g.ports[portStdout], Stderr: g.ports[portStderr]}
	if r.Stdin {
		std.Stdin = stdin
	}
	if r.Same {
		std.Stderr = std.Stdout
	}
	res, err := g.backend.Run(ctx, &r.Spec, std)
	if err != nil {
		return errorAnswer(err)
	}
	a := answer{Result: res, Took: res.End.Sub(res.Start)}
	res.Start, res.End = time.Time{}, time.Time{} // the host has its own clock
	return a
}
