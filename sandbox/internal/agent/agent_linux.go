// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// Main runs the agent if this process was started as one, and does not return then.
func Main() {
	if len(os.Args) != 2 || path.Base(os.Args[0]) != Program || os.Args[1] != Serve {
		return
	}
	if err := serve(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Program, err)
		syscall.Exit(1)
	}
	syscall.Exit(0)
}

// grace is the time between SIGTERM and the end of everything when the agent's peer closes the socket.
const grace = 3 * time.Second

// A server starts commands and waits for them.
type server struct {
	reply func(Reply) error

	mu      sync.Mutex
	running map[uint64]int // process IDs of commands that were not reaped
	active  int            // commands whose end was not reported
	idle    *sync.Cond     // active is 0
}

// serve handles requests until the peer closes the socket. Then it ends all processes.
func serve() error {
	// Other processes of this user must not read the agent's memory, nor find it in /proc.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	// It must not die with those that it terminates. Unlike an ignored signal, a caught one is reset in its children.
	signal.Notify(make(chan os.Signal, 1), unix.SIGTERM, unix.SIGHUP, unix.SIGINT)
	s := &server{running: map[uint64]int{}}
	s.idle = sync.NewCond(&s.mu)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	go s.reap(ended)
	var err error
	if _, notSocket := unix.GetsockoptInt(0, unix.SOL_SOCKET, unix.SO_TYPE); notSocket != nil {
		err = s.serveWire()
	} else {
		err = s.servePackets()
	}
	if err == nil {
		s.terminate()
	}
	return err
}

// servePackets handles requests from a socket.
func (s *server) servePackets() error {
	s.reply = func(r Reply) error { return zygote.Send(0, Encode(r)) }
	if err := sendReady(0); err != nil {
		return err
	}
	for {
		packet, fds, err := zygote.Receive(0)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		var r Request
		if err := json.Unmarshal(packet, &r); err != nil {
			return fmt.Errorf("request: %w", err)
		}
		if r.Signal != 0 {
			s.signal(&r)
		} else if err := s.start(&r, fds); err != nil {
			return err
		}
		closeAll(fds)
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// terminate gives the processes some time to end. They are killed when the agent exits.
func (s *server) terminate() {
	_ = unix.Kill(-1, unix.SIGTERM) // fails if there is no other
	timer := time.AfterFunc(grace, func() { syscall.Exit(0) })
	defer timer.Stop()
	s.mu.Lock()
	for s.active > 0 {
		s.idle.Wait()
	}
	s.mu.Unlock()
	for unix.Kill(-1, 0) == nil { // processes in the background, which the agent cannot wait for
		time.Sleep(10 * time.Millisecond)
	}
}

func (s *server) signal(r *Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if pid := s.running[r.ID]; pid > 0 {
		if unix.Kill(-pid, unix.Signal(r.Signal)) != nil { // the command has left its group
			_ = unix.Kill(pid, unix.Signal(r.Signal))
		}
	}
}

// start starts a command and reports its end in the background.
func (s *server) start(r *Request, fds []int) error {
	want := 3
	if r.Terminal {
		want = 1
	}
	if len(fds) != want || len(r.Args) == 0 {
		return fmt.Errorf("request with %d arguments and %d descriptors", len(r.Args), len(fds))
	}
	files := []uintptr{uintptr(fds[0]), uintptr(fds[0]), uintptr(fds[0])}
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if !r.Terminal {
		files[1], files[2] = uintptr(fds[1]), uintptr(fds[2])
		sys = &syscall.SysProcAttr{Setpgid: true}
	}
	env := merge(os.Environ(), r.Env)
	program, code, reason := find(r.Args[0], r.Dir, env)
	if reason == "" {
		s.mu.Lock()
		defer s.mu.Unlock()
		pid, err := syscall.ForkExec(program, r.Args, &syscall.ProcAttr{Dir: r.Dir, Env: env, Files: files, Sys: sys})
		if err == nil {
			s.running[r.ID] = pid
			s.active++
			return nil
		}
		code, reason = 126, fmt.Sprintf("%s: %v", r.Args[0], err)
	}
	_, _ = unix.Write(int(files[2]), []byte("cloister: "+reason+"\n")) // nobody may read it
	return s.reply(Reply{ID: r.ID, Code: code})
}

// reap waits for the commands that have ended, after each signal. A thread that waits for each command would count
// towards the limit of processes, and remain.
func (s *server) reap(ended <-chan os.Signal) {
	for range ended {
		for s.reapOne() {
		}
	}
}

// reapOne waits for a command that has ended, and reports whether there was one.
func (s *server) reapOne() bool {
	s.mu.Lock() // while start holds it, a process may end that is no command
	defer s.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if err == unix.EINTR {
		return true
	}
	if err != nil || pid == 0 {
		return false
	}
	for id, p := range s.running {
		if p == pid {
			delete(s.running, id) // before its number can be another process's
			go s.report(id, status)
		}
	}
	return true
}

// report reports the end of a command.
func (s *server) report(id uint64, status unix.WaitStatus) {
	code := status.ExitStatus()
	if status.Signaled() {
		code = 128 + int(status.Signal())
	}
	if err := s.reply(Reply{ID: id, Code: code}); err != nil {
		syscall.Exit(1) // nobody would learn of the end of any command
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active--; s.active == 0 {
		s.idle.Broadcast()
	}
}

// find returns the path of a program, or the exit code that a shell gives with the reason why it cannot be executed.
func find(name, dir string, env []string) (program string, code int, reason string) {
	var st unix.Stat_t
	if dir != "" && (unix.Stat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR) {
		return "", 126, fmt.Sprintf("%s is not a directory in the sandbox", dir)
	}
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, kv := range env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				for d := range strings.SplitSeq(list, ":") {
					candidates = append(candidates, path.Join(d, name))
				}
			}
		}
	}
	found := false
	for _, c := range candidates {
		at := c
		if !path.IsAbs(c) {
			at = path.Join(dir, c)
		}
		if unix.Stat(at, &st) != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		if unix.Access(at, unix.X_OK) == nil {
			return c, 0, ""
		}
		found = true
	}
	if found {
		return "", 126, name + ": not executable"
	}
	return "", 127, name + ": not found in the sandbox"
}

// merge returns the variables of env and changes, of which the later win.
func merge(env, changes []string) []string {
	all := map[string]string{}
	for _, kv := range slices.Concat(env, changes) {
		k, _, _ := strings.Cut(kv, "=")
		all[k] = kv
	}
	return slices.Sorted(maps.Values(all))
}

// sendReady reports on a socket that the agent is ready.
func sendReady(sock int) error {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	defer closeAll(pipe[:])
	return zygote.Send(sock, Encode(Reply{}), pipe[0])
}
