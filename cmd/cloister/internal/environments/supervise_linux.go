// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/unixsocket"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/environment"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
)

// A supervisor holds one sandbox.
type supervisor struct {
	config *Config
	dir    string
	state  State
	log    *eventLog
	env    *environment.Environment
	task   *worker.Task
	worker *localworker.Worker

	outcome *worker.Outcome // how the run ended, once env has ended

	mu     sync.Mutex
	reason string // why the sandbox ends, the first counts
	active int    // commands
	idle   *time.Timer
	conns  sync.WaitGroup
	stop   context.CancelFunc // ends the sandbox
	ended  chan struct{}      // closed when everything has ended, and state says why
}

// supervise makes the sandbox and serves it until its end. It writes the state to ready once commands can be executed,
// and closes it.
func (c *Config) supervise(ctx context.Context, dir string, ready func(*State) error) error {
	s := &supervisor{config: c, dir: dir, ended: make(chan struct{}), state: State{
		Name: filepath.Base(dir), Sandbox: c.Sandbox.Tier, Root: c.RootName(), PID: os.Getpid(), IdleTimeout: c.IdleTimeout.Seconds(),
	}}
	var err error
	if s.log, err = openLog(filepath.Join(dir, logFile)); err != nil {
		return err
	}
	defer s.log.close()
	if err := noteTemp(dir); err != nil { // before the first temporary file
		return err
	}
	if s.worker, err = localworker.Open(&c.Sandbox); err != nil {
		return err
	}
	err = s.run(ctx, ready)
	if closeErr := s.worker.Close(); closeErr != nil {
		return errors.Join(err, closeErr) // a sweep removes the rest
	}
	return errors.Join(err, os.Remove(filepath.Join(dir, tempFile)))
}

// run starts the environment, serves it and ends it.
func (s *supervisor) run(ctx context.Context, ready func(*State) error) error {
	if err := s.start(ctx); err != nil {
		return s.config.ExplainRefusal(err)
	}
	defer func() { // unless it has ended
		now, cancel := context.WithCancel(ctx)
		cancel()
		_, _ = s.env.Close(now)
	}()
	l, err := unixsocket.Listen(s.dir, socketFile)
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, s.stop = context.WithCancel(ctx)
	defer s.stop()
	if s.config.IdleTimeout > 0 {
		s.idle = time.AfterFunc(s.config.IdleTimeout, s.endIdle)
	}
	s.state.Created = time.Now()
	s.state.Expires = s.state.Created.Add(s.config.Lifetime)
	s.state.Running = true
	if err := write(s.dir, &s.state); err != nil {
		return err
	}
	s.log.add("created")
	if err := ready(&s.state); err != nil {
		return err
	}
	go s.serve(l)
	select {
	case <-ctx.Done():
	case <-s.env.Ended():
	}
	return s.finish(ctx, l)
}

// start makes the environment.
func (s *supervisor) start(ctx context.Context) (err error) {
	c := s.config
	if c.Program, err = os.Executable(); err != nil {
		return err
	}
	c.Args = environment.Args(localworker.ProgramDir)
	if s.task, err = c.Put(ctx, s.worker, io.Discard); err != nil {
		return err
	}
	s.task.SkipCacheLookup = true
	if err := s.worker.Start(ctx, worker.Config{
		Name: "sandbox-" + s.state.Name, MaxTimeout: c.Lifetime, Toolchain: c.volumes,
		LogBytes: 4 << 10, // of the agent; with another kernel its stdout carries the output of all commands
	}); err != nil {
		return err
	}
	s.state.Tier = s.worker.Features.Tier
	return s.startAgent(ctx, &s.worker.Features, func(ctx context.Context, std sandbox.Stdio) (*worker.Outcome, error) {
		t := *s.task
		t.Stdin, t.Stdout, t.Stderr, t.Queued = std.Stdin, std.Stdout, std.Stderr, time.Now()
		return s.worker.Local.Execute(ctx, &t, nil)
	})
}

// startAgent starts the environment whose agent execute runs.
func (s *supervisor) startAgent(
	ctx context.Context, features *sandbox.Features, execute func(context.Context, sandbox.Stdio) (*worker.Outcome, error),
) (err error) {
	s.env, err = environment.Start(ctx, features, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		out, err := execute(ctx, std)
		if err != nil {
			return nil, err
		}
		s.outcome = out
		return &sandbox.Result{
			ExitCode: int(out.Result.GetExitCode()), Stopped: out.Status == worker.StatusTimedOut, Start: out.Started, End: out.Ended,
		}, nil
	})
	if errors.Is(err, environment.ErrEnded) {
		return fmt.Errorf("the sandbox ended before it was ready: maximum lifetime of %v; pass a longer --lifetime", s.config.Lifetime)
	}
	return err
}

// end ends the sandbox for a reason.
func (s *supervisor) end(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked(reason)
}

func (s *supervisor) endLocked(reason string) {
	if s.reason == "" {
		s.reason = reason
	}
	s.stop()
}

// finish ends what runs, and records how the sandbox ended.
func (s *supervisor) finish(ctx context.Context, l net.Listener) error {
	if s.idle != nil {
		s.idle.Stop()
	}
	if by, ok := errors.AsType[*interrupt.Error](context.Cause(ctx)); ok {
		s.end(by.Error())
	}
	_, err := s.env.Close(context.Background())
	l.Close()
	reason := printable.Text(s.explainEnd(err))
	s.state.Running, s.state.Ended, s.state.Reason = false, time.Now(), reason
	s.log.add("ended: " + reason)
	s.logDenials()
	err = write(s.dir, &s.state)
	_ = os.Remove(filepath.Join(s.dir, socketFile)) // a stopped sandbox needs none
	close(s.ended)
	s.conns.Wait()
	return err
}

// explainEnd returns why the sandbox ended.
func (s *supervisor) explainEnd(err error) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch out := s.outcome; {
	case s.reason != "":
	case err != nil:
		s.reason = err.Error()
	case out.Status == worker.StatusTimedOut:
		s.reason = fmt.Sprintf("maximum lifetime of %v", s.config.Lifetime)
	case out.Exceeded != "":
		s.reason = "limit of " + string(out.Exceeded)
	default:
		s.reason = "its agent was killed"
	}
	return s.reason
}

// logDenials logs what the sandbox denied, a line each.
func (s *supervisor) logDenials() {
	if s.outcome == nil || s.outcome.AuditLog.IsZero() {
		return
	}
	in, err := s.worker.Store.Instance("")
	if err != nil {
		s.log.add("violations are lost: " + err.Error())
		return
	}
	text, err := cas.ReadAll(context.Background(), in.Store, s.outcome.AuditLog, maxLog)
	if err != nil {
		s.log.add("violations are lost: " + err.Error())
	}
	for line := range strings.Lines(string(text)) {
		if kind, _, _ := strings.Cut(line, " "); slices.Contains(logged, sandbox.EventKind(kind)) {
			s.log.add(strings.TrimSpace(line))
		}
	}
}

// logged are the kinds of events in a log. Files that are left behind are no surprise.
var logged = []sandbox.EventKind{
	sandbox.EventConnect, sandbox.EventAllowed, sandbox.EventUnreachable, sandbox.EventWrite, sandbox.EventExec,
	sandbox.EventSyscall, sandbox.EventRead, sandbox.EventLimit,
}

// serve accepts connections until the listener is closed.
func (s *supervisor) serve(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		s.conns.Go(func() {
			defer conn.Close()
			s.handle(conn.(*net.UnixConn))
		})
	}
}

// handle serves one request.
func (s *supervisor) handle(conn *net.UnixConn) {
	var r request
	_ = conn.SetReadDeadline(time.Now().Add(requestTimeout))
	files, err := receive(conn, &r)
	if err != nil {
		return // only this user's programs get here
	}
	_ = conn.SetReadDeadline(time.Time{})
	defer closeFiles(files)
	switch r.Verb {
	case "stop":
		s.end("stopped")
		<-s.ended
		_ = send(conn, &reply{}) // the client waits for the lock as well
	case "exec":
		_ = send(conn, s.exec(conn, &r, files)) // the client may be gone
	default:
		_ = send(conn, &reply{Code: exit.Internal, Error: fmt.Sprintf("unknown request %q: the sandbox was created by another version of cloister", r.Verb)})
	}
}

// requestTimeout is the time for a client to send its request.
const requestTimeout = 10 * time.Second

// exec runs a command. Its signals come from conn; if the client hangs up, the command is ended.
func (s *supervisor) exec(conn *net.UnixConn, r *request, files []*os.File) *reply {
	std, err := streamsOf(r, files)
	if err != nil {
		return &reply{Code: exit.Internal, Error: err.Error()}
	}
	s.begin()
	defer s.done()
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() {
		select {
		case <-s.env.Ended():
			cancel(environment.ErrEnded) // a client that reads nothing must not delay the end
		case <-ctx.Done():
		}
	}()
	signals := make(chan os.Signal)
	go func() {
		var b [1]byte
		for {
			if _, err := conn.Read(b[:]); err != nil {
				cancel(errHungUp)
				return
			}
			select {
			case signals <- syscall.Signal(b[0]):
			case <-ctx.Done():
				return
			}
		}
	}()
	started := time.Now()
	spec := &sandbox.Spec{Args: r.Args, Env: r.Env, Dir: r.Dir, Grace: hangUpGrace}
	if r.Session {
		spec.Args = sessionArgs(r.Args, r.Env)
	}
	code, err := s.env.Exec(ctx, spec, std, signals)
	s.log.command(r.Args, code, time.Since(started), err)
	if errors.Is(err, environment.ErrEnded) {
		<-s.ended
		return &reply{Error: s.state.Reason, Ended: true}
	}
	switch {
	case errors.Is(err, sandbox.ErrSpec), errors.Is(err, sandbox.ErrUnsupported):
		return &reply{Code: exit.Usage, Error: err.Error()}
	case err != nil:
		return &reply{Code: exit.Internal, Error: err.Error()}
	}
	return &reply{Code: code}
}

var errHungUp = errors.New("the client hung up")

// hangUpGrace is the time between SIGTERM and SIGKILL for a command whose client has hung up.
const hangUpGrace = 2 * time.Second

// endIdle ends the sandbox unless a command has just begun.
func (s *supervisor) endIdle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active == 0 {
		s.endLocked(fmt.Sprintf("idle for %v", s.config.IdleTimeout))
	}
}

// begin and done count commands: the sandbox is idle while there is none.
func (s *supervisor) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active++
	if s.idle != nil {
		s.idle.Stop()
	}
}

func (s *supervisor) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active--; s.active == 0 && s.idle != nil {
		s.idle.Reset(s.config.IdleTimeout)
	}
}

// streamsOf returns the streams of a command.
func streamsOf(r *request, files []*os.File) (std sandbox.Stdio, err error) {
	switch {
	case r.Terminal && len(files) == 1:
		std.Terminal = files[0]
	case !r.Terminal && len(files) == 3:
		std.Stdin, std.Stdout, std.Stderr = files[0], files[1], files[2]
	default:
		err = fmt.Errorf("request with %d descriptors", len(files))
	}
	return std, err
}
