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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopTime is the time limit for a server to drain and exit.
const stopTime = 3 * time.Minute

// BuildCloister compiles cloister to the file name. The working directory must be in the repository. Call it from a
// test, not from TestMain.
func BuildCloister(name string) error { return BuildCommand(name, "cloister") }

// BuildCommand compiles a command of the repository, as BuildCloister does.
func BuildCommand(name, command string) error {
	program := "github.com/cloister-build/cloister/cmd/" + command
	// Unlike go build, go run caches the linked program, so that only the first package of tests links it.
	build := exec.Command("go", "run", "-ldflags=-s -w", "-exec=cp", program, name)
	// Static, as released, which also starts faster. Without debug information it links in half the time.
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", command, err, out)
	}
	return DependOn(program)
}

// DependOn makes the test's cached result depend on the sources of packages that other processes read: go test reuses a
// result if no file that the test itself opened has changed. The arguments are those of go list.
func DependOn(packages ...string) error {
	const files = `{{if not .Standard}}{{$dir := .Dir}}{{range .GoFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}{{end}}`
	sources, err := exec.Command("go", append([]string{"list", "-deps", "-f", files}, packages...)...).Output()
	if err != nil {
		return fmt.Errorf("list the sources of %s: %w", packages, err)
	}
	for name := range strings.FieldsSeq(string(sources)) {
		if _, err := os.Stat(name); err != nil && strings.HasSuffix(name, ".go") { // others are generated
			return err
		}
	}
	return nil
}

// Confines returns an error with cloister's output if user, or the current user if that is nil, cannot run a command in
// the sandbox on this host.
func Confines(ctx context.Context, cloister string, user *syscall.Credential) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
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

// A ServerConfig configures a cloister serve.
type ServerConfig struct {
	Binary string // the program cloister
	Dir    string // of its store
	Home   string // its HOME
	Listen string // HOST:PORT; port 0 is any free one
	Jobs   int    // concurrent actions; 0 means serve's default
	// NoJobs makes it execute nothing, so that it starts without probing the sandbox and scanning the toolchain.
	NoJobs bool
	// Toolchain, if not "", is its --toolchain. To scan /usr takes most of the CPU time of a short test.
	Toolchain string
	// MaxSize is the size of the store; "" means 10GiB.
	MaxSize string
	// Args are additional flags.
	Args []string
	// Env are additional environment variables.
	Env []string
	// Join, if not "", is the address of a head: run a worker of it, cloister join, which has no address of its own.
	Join string
	// User runs it; nil means the current user.
	User *syscall.Credential
	// Log, if not nil, receives its output.
	Log io.Writer
}

// A Server is a running cloister serve or join. The caller ends it with Stop or Kill.
type Server struct {
	// Addr is its address, HOST:PORT, or that of its head.
	Addr string
	// PID is its process id.
	PID  int
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended, after err is set
	err  error
}

// StartServer starts cloister serve and returns when it is ready. It fails with serve's output if serve ends first or
// ctx does.
func StartServer(ctx context.Context, cfg ServerConfig) (*Server, error) {
	args := []string{"serve", "--listen", cfg.Listen}
	if cfg.Join != "" {
		args = []string{"join", "grpc://" + cfg.Join}
	}
	args = append(args, "--dir", cfg.Dir, "--max-size", cmp.Or(cfg.MaxSize, "10GiB"))
	if cfg.Jobs > 0 {
		args = append(args, "--jobs", strconv.Itoa(cfg.Jobs))
	}
	if cfg.NoJobs {
		args = append(args, "--jobs", "0", "--worker-listen", "127.0.0.1:0")
	}
	if cfg.Toolchain != "" {
		args = append(args, "--toolchain", cfg.Toolchain)
	}
	if cfg.Join == "" && !slices.Contains(cfg.Args, "--web") {
		args = append(args, "--web", "") // servers of other tests may have the default port
	}
	args = append(args, cfg.Args...)
	s := &Server{cmd: exec.Command(cfg.Binary, args...), done: make(chan struct{})}
	banner := &banner{ready: make(chan string, 1), log: cfg.Log}
	s.cmd.Dir = "/"
	s.cmd.Env = append(environment(cfg.Home), cfg.Env...)
	s.cmd.Stdout, s.cmd.Stderr = banner, banner
	// A separate process group, so that Ctrl-C reaches only the parent, which stops the server in order. If the parent
	// dies, the kernel stops the server.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM, Credential: cfg.User}
	started := make(chan error)
	go func() {
		// Pdeathsig follows the thread that started the server, so keep this thread as long as the server.
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

// Stop sends SIGTERM and waits for the server's end. It returns an error if the server fails or has to be killed.
func (s *Server) Stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		<-s.done
		return fmt.Errorf("cloister serve had already ended: %w", errors.Join(err, s.err))
	}
	return s.Wait()
}

// Wait waits for the end of a stopping server, as Stop does.
func (s *Server) Wait() error {
	select {
	case <-s.done:
		return s.err
	case <-time.After(stopTime):
		s.Kill()
		return fmt.Errorf("cloister serve did not end in %v and was killed", stopTime)
	}
}

// Kill kills the server and waits for its end.
func (s *Server) Kill() {
	// Fails only if it has already ended.
	_ = s.cmd.Process.Kill()
	<-s.done
}

// endpoint matches the line that serve or join prints when it is ready.
var endpoint = regexp.MustCompile(`(?:--remote_executor=|(?m:^)joins +)grpcs?://([0-9.]+:\d+)`)

// A banner collects a server's output and finds its address.
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
		// Log before reporting readiness.
		if n, err := b.log.Write(p); err != nil {
			return n, err
		}
	}
	// Only complete lines contain a complete address.
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

// environment is the environment of child processes, which contains none of the user's configuration.
func environment(home string) []string {
	return []string{"HOME=" + home, "LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin", "USER=cloister"}
}
