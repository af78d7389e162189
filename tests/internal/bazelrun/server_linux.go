// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopTime is how long a server may take to drain and end once it is told to.
const stopTime = 20 * time.Second

// BuildCloister compiles the program cloister to the file name. The working directory must be in the repository. A test
// calls it while it runs, not from TestMain.
func BuildCloister(name string) error { return BuildCommand(name, "cloister") }

// BuildCommand compiles a command of the repository, as BuildCloister does.
func BuildCommand(name, command string) error {
	program := "github.com/cloister-build/cloister/cmd/" + command
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", name, program)
	// As it is released: a static program, which also starts faster. Nobody debugs it, and without what debuggers
	// read it is linked in half the time.
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", command, err, out)
	}
	// go test gives a result from its cache if no file has changed that the test itself looked at while
	// it ran. The sources were read by another process, so look at them.
	const files = `{{if not .Standard}}{{$dir := .Dir}}{{range .GoFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}{{end}}`
	sources, err := exec.Command("go", "list", "-deps", "-f", files, program).Output()
	if err != nil {
		return fmt.Errorf("list the sources of %s: %w", command, err)
	}
	for _, name := range strings.Fields(string(sources)) {
		if _, err := os.Stat(name); err != nil {
			return err
		}
	}
	return nil
}

// Confines returns nil if user, or whoever runs this process if that is nil, can run a command in the
// sandbox on this host, and otherwise an error with what cloister says about it.
func Confines(ctx context.Context, cloister string, user *syscall.Credential) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, cloister, "run", "--", "/bin/true")
	cmd.Dir = "/"
	cmd.Env = environment("/nonexistent")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: user}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cloister run: %w\n%s", err, out)
	}
	return nil
}

// A ServerConfig says how to start cloister serve.
type ServerConfig struct {
	Binary string // the program cloister
	Dir    string // its store
	Home   string // its HOME
	Listen string // HOST:PORT; port 0 is any free one
	Jobs   int    // actions at once; 0 is serve's default
	// MaxSize is the size of the store; "" is 10GiB.
	MaxSize string
	// Args are further flags.
	Args []string
	// Env are further variables of its environment.
	Env []string
	// User is who runs it; nil is whoever runs this process.
	User *syscall.Credential
	// Log sees what it prints, if not nil.
	Log io.Writer
}

// A Server is a running cloister serve. The caller ends it by Stop or Kill.
type Server struct {
	// Addr is where it listens, HOST:PORT.
	Addr string
	// PID is its process.
	PID  int
	cmd  *exec.Cmd
	done chan struct{} // closed once it has ended, after err is set
	err  error
}

// StartServer starts cloister serve and returns once it is ready. It fails if serve ends first, with
// what it printed, or if ctx does.
func StartServer(ctx context.Context, cfg ServerConfig) (*Server, error) {
	args := []string{"serve", "--listen", cfg.Listen, "--dir", cfg.Dir, "--max-size", cmp.Or(cfg.MaxSize, "10GiB")}
	if cfg.Jobs > 0 {
		args = append(args, "--jobs", strconv.Itoa(cfg.Jobs))
	}
	args = append(args, cfg.Args...)
	s := &Server{cmd: exec.Command(cfg.Binary, args...), done: make(chan struct{})}
	banner := &banner{ready: make(chan string, 1), log: cfg.Log}
	s.cmd.Dir = "/"
	s.cmd.Env = append(environment(cfg.Home), cfg.Env...)
	s.cmd.Stdout, s.cmd.Stderr = banner, banner
	// A group of its own, so that Ctrl-C at a terminal reaches the parent alone, which then stops the
	// server in order. If the parent dies instead, nothing is left to stop it.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, Credential: cfg.User}
	started := make(chan error)
	go func() {
		// What is taken for the parent's death is that of the thread that started the server, and threads of a Go
		// program end: this one lasts as long as the server.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := s.cmd.Start()
		started <- err
		if err == nil {
			s.err = s.cmd.Wait()
			close(s.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start cloister serve: %w", err)
	}
	s.PID = s.cmd.Process.Pid
	select {
	case s.Addr = <-banner.ready:
		return s, nil
	case <-s.done:
		return nil, fmt.Errorf("cloister serve ended before it was ready: %v\n%s", s.err, banner.text())
	case <-ctx.Done():
		s.Kill()
		return nil, fmt.Errorf("cloister serve is not ready: %w\n%s", context.Cause(ctx), banner.text())
	}
}

// Stop tells the server to end and waits until it has. It returns an error if it ends with one, or has
// to be killed because it does not end.
func (s *Server) Stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-s.done
		return fmt.Errorf("cloister serve had already ended: %w", errors.Join(err, s.err))
	}
	select {
	case <-s.done:
		return s.err
	case <-time.After(stopTime):
		s.Kill()
		return fmt.Errorf("cloister serve did not end in %v and was killed", stopTime)
	}
}

// Kill ends the server as a crash would and waits until it has ended.
func (s *Server) Kill() {
	// The only error is that it has already ended.
	_ = s.cmd.Process.Kill()
	<-s.done
}

// endpoint is in the line that serve prints once it is ready.
var endpoint = regexp.MustCompile(`--remote_executor=grpcs?://([0-9.]+:\d+)`)

// A banner keeps what a server prints, and finds its address in it.
type banner struct {
	ready chan string // receives the address, once
	log   io.Writer

	mu    sync.Mutex
	seen  bytes.Buffer // guarded by mu
	found bool         // guarded by mu
}

func (b *banner) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seen.Write(p)
	if b.log != nil {
		// Before anybody hears that the server is ready, and reads it.
		if n, err := b.log.Write(p); err != nil {
			return n, err
		}
	}
	// Only whole lines: an address that is still being written would be a wrong one.
	whole := b.seen.Bytes()[:bytes.LastIndexByte(b.seen.Bytes(), '\n')+1]
	if match := endpoint.FindSubmatch(whole); match != nil && !b.found {
		b.found = true
		b.ready <- string(match[1])
	}
	return len(p), nil
}

func (b *banner) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seen.String()
}

// environment is all that a child process is told of this one's: nothing of a person's configuration.
func environment(home string) []string {
	return []string{"HOME=" + home, "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin", "USER=cloister"}
}
