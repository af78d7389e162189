// SPDX-License-Identifier: Apache-2.0

package environment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/agent"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// An Environment is a sandbox in which commands run. Its methods are safe for concurrent use.
type Environment struct {
	sock    int  // blocking; closed after the reader has ended
	owner   int  // of what the commands make, on this host
	relayed bool // the agent has another kernel
	stop    context.CancelFunc

	ready  chan struct{} // closed when the agent is ready
	ended  chan struct{} // closed when the run is over, and result and err are set
	reader sync.WaitGroup
	broken bool // the agent does not speak the protocol; set by reader
	result *sandbox.Result
	err    error
	output head // what the agent printed

	mu    sync.Mutex
	last  uint64
	calls map[uint64]chan int // exit codes of commands that run
	shut  bool                // sock is closed or about to be
}

// Start starts an environment. It calls run once, in the background, with the streams of the agent; run runs the Spec
// whose command is Args on a sandbox.Backend with these features, and returns when that has ended. Start returns when
// commands can be executed, or with the reason why none can. The context of run ends when Close kills the environment,
// and does not end with ctx. The caller closes the Environment.
//
// The streams of commands are passed to the agent as descriptors. If runs have a kernel of their own, they are copied
// through the streams of the run instead: a command cannot have a terminal, and its stdin ends when it does.
func Start(
	ctx context.Context, features *sandbox.Features, run func(context.Context, sandbox.Stdio) (*sandbox.Result, error),
) (*Environment, error) {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket of the environment: %w", err)
	}
	// A command may stop the agent, which then reads nothing.
	if err := unix.SetsockoptTimeval(sv[0], unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 2}); err != nil {
		unix.Close(sv[0])
		unix.Close(sv[1])
		return nil, fmt.Errorf("socket of the environment: %w", err)
	}
	e := &Environment{
		sock: sv[0], ready: make(chan struct{}), ended: make(chan struct{}), calls: map[uint64]chan int{},
		relayed: features.Kernel != "",
	}
	var running context.Context
	running, e.stop = context.WithCancel(context.WithoutCancel(ctx))
	e.reader.Go(e.read)
	go func() {
		theirs := os.NewFile(uintptr(sv[1]), "agent")
		var result *sandbox.Result
		var err error
		if e.relayed {
			result, err = e.relay(running, theirs, run)
		} else {
			result, err = run(running, sandbox.Stdio{Stdin: theirs, Stdout: &e.output, Stderr: &e.output})
		}
		theirs.Close()
		e.end(result, err)
	}()
	select {
	case <-e.ready:
		return e, nil
	case <-e.ended:
		return nil, e.explain()
	case <-ctx.Done():
		e.stop()
		<-e.ended
		return nil, context.Cause(ctx)
	}
}

// relay performs run, with whose agent it connects the socket theirs.
func (e *Environment) relay(
	ctx context.Context, theirs *os.File, run func(context.Context, sandbox.Stdio) (*sandbox.Result, error),
) (*sandbox.Result, error) {
	stdin, out, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("streams of the environment: %w", err)
	}
	defer stdin.Close()
	in, stdout := io.Pipe()
	relayed := make(chan error, 1)
	go func() {
		err := agent.Relay(int(theirs.Fd()), in, out)
		in.CloseWithError(err)
		e.stop() // or the run has ended
		relayed <- err
	}()
	result, err := run(ctx, sandbox.Stdio{Stdin: stdin, Stdout: stdout, Stderr: &e.output})
	stdout.Close()
	return result, errors.Join(err, <-relayed)
}

// end records how the run ended and wakes all calls.
func (e *Environment) end(result *sandbox.Result, err error) {
	e.stop()
	e.mu.Lock()
	e.shut = true
	e.result, e.err = result, err
	_ = unix.Shutdown(e.sock, unix.SHUT_RDWR) // the agent may be gone
	e.mu.Unlock()
	e.reader.Wait()
	unix.Close(e.sock)
	close(e.ended)
}

// explain returns why the environment did not become ready.
func (e *Environment) explain() error {
	switch {
	case e.err != nil:
		return e.err
	case e.result == nil:
		return ErrEnded
	case e.result.Stopped && !e.broken: // not by the end of the context: Start returns its cause
		return fmt.Errorf("%w before its agent was ready, because its timeout is too short", ErrEnded)
	}
	if text := strings.TrimSpace(e.output.String()); text != "" {
		return fmt.Errorf("the agent of the environment failed with exit code %d: %s", e.result.ExitCode, text)
	}
	return fmt.Errorf("the agent of the environment failed with exit code %d: its program must be static if the root file system "+
		"lacks this host's libraries", e.result.ExitCode)
}

// read delivers replies until the agent's end. The agent is not trusted: a reply that nobody waits for is dropped.
func (e *Environment) read() {
	ready := false
	for {
		packet, fds, err := zygote.Receive(e.sock)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				e.reject()
			}
			return
		}
		var r agent.Reply
		err = json.Unmarshal(packet, &r)
		if err == nil && r.ID == 0 && !ready && len(fds) == 1 {
			var st unix.Stat_t
			if err = unix.Fstat(fds[0], &st); err == nil {
				e.owner, ready = int(st.Uid), true
				close(e.ready)
			}
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
		if err != nil {
			e.reject()
			return
		}
		e.mu.Lock()
		if c := e.calls[r.ID]; c != nil {
			c <- r.Code & 0xff
			delete(e.calls, r.ID)
		}
		e.mu.Unlock()
	}
}

// reject ends the run of an agent that does not speak the protocol.
func (e *Environment) reject() {
	e.broken = true
	e.stop()
}

// send sends a request, and registers a new call if exit is not nil.
func (e *Environment) send(r *agent.Request, exit chan int, fds ...int) error {
	packet := agent.Encode(r)
	if len(packet) > zygote.MaxPacket {
		return fmt.Errorf("%w: arguments and variables of a command take %d bytes, more than %d", sandbox.ErrSpec, len(packet), zygote.MaxPacket)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shut {
		return ErrEnded
	}
	if exit != nil {
		e.calls[r.ID] = exit
	}
	if err := zygote.Send(e.sock, packet, fds...); err != nil {
		delete(e.calls, r.ID)
		e.stop() // the agent reads nothing more, so that nothing can end its commands
		return fmt.Errorf("%w: %w", ErrEnded, err)
	}
	return nil
}

// Exec runs a command and returns its exit code when it has ended: 128+N after signal N, 127 if the program was not
// found and 126 if it is not executable. Only Args, Dir, Env and Grace of the Spec count: Dir is a directory of the
// sandbox, or "" for that of the environment, and Env adds to the environment's variables. Std is as in Backend.Run,
// but what processes in the background write after the command's end is lost.
//
// Each signal from signals, which may be nil, is sent to the command's process group. When ctx ends, the group gets
// SIGTERM and, after Grace, SIGKILL; the error is then the cause. It is ErrEnded if the environment ends first,
// ErrSpec for an invalid command, and ErrUnsupported for a terminal where none is possible.
func (e *Environment) Exec(
	ctx context.Context, spec *sandbox.Spec, std sandbox.Stdio, signals <-chan os.Signal,
) (int, error) {
	if err := check(spec); err != nil {
		return 0, err
	}
	s, err := e.open(std)
	if err != nil {
		return 0, err
	}
	defer s.close()
	e.mu.Lock()
	e.last++
	r := &agent.Request{ID: e.last, Args: spec.Args, Env: spec.Env, Dir: spec.Dir, Terminal: std.Terminal != nil, Joined: s.joined}
	e.mu.Unlock()
	exit := make(chan int, 1)
	if err := e.send(r, exit, s.theirs...); err != nil {
		return 0, err
	}
	s.handOver()
	code, err := e.wait(ctx, r.ID, exit, signals, spec.Grace)
	return code, errors.Join(err, s.drain(ctx))
}

// wait waits for the end of a command, and signals it.
func (e *Environment) wait(
	ctx context.Context, id uint64, exit <-chan int, signals <-chan os.Signal, grace time.Duration,
) (int, error) {
	send := func(sig unix.Signal) { _ = e.send(&agent.Request{ID: id, Signal: int(sig)}, nil) } // it may have ended
	done := ctx.Done()
	var kill, lost <-chan time.Time
	for {
		select {
		case code := <-exit:
			return code, context.Cause(ctx)
		case <-e.ended:
			return 0, ErrEnded
		case s, ok := <-signals:
			if sig, is := s.(syscall.Signal); is && sig > 0 {
				send(sig)
			}
			if !ok {
				signals = nil
			}
		case <-done:
			done = nil
			send(unix.SIGTERM)
			kill = time.After(grace)
		case <-kill:
			send(unix.SIGKILL)
			kill, lost = nil, time.After(2*time.Second)
		case <-lost: // the command has left its process group, or stopped the agent
			return 0, context.Cause(ctx)
		}
	}
}

// check returns ErrSpec for an invalid command.
func check(spec *sandbox.Spec) error {
	if spec == nil || len(spec.Args) == 0 || spec.Args[0] == "" {
		return fmt.Errorf("%w: no program to run", sandbox.ErrSpec)
	}
	for _, kv := range spec.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" {
			return fmt.Errorf("%w: environment entry %q is not KEY=VALUE", sandbox.ErrSpec, kv)
		}
	}
	for _, list := range [][]string{spec.Args, spec.Env, {spec.Dir}} {
		for _, text := range list {
			if strings.ContainsRune(text, 0) {
				return fmt.Errorf("%w: %q contains NUL", sandbox.ErrSpec, text)
			}
		}
	}
	return nil
}

// Close ends the environment: its processes get SIGTERM and, after three seconds, SIGKILL; when ctx ends they are
// killed at once. It returns how the run ended. Later calls return the same.
//
// The agent signals them. If a command has stopped the agent, they are killed after five seconds.
func (e *Environment) Close(ctx context.Context) (*sandbox.Result, error) {
	e.mu.Lock()
	if !e.shut {
		e.shut = true
		_ = unix.Shutdown(e.sock, unix.SHUT_WR) // the agent may be gone
	}
	e.mu.Unlock()
	select {
	case <-e.ended:
	case <-ctx.Done():
		e.stop()
	case <-time.After(closeTime):
		e.stop()
	}
	<-e.ended
	return e.result, e.err
}

// closeTime is longer than an agent gives its commands.
const closeTime = 5 * time.Second

// Ended returns a channel that is closed when the environment has ended, for any reason.
func (e *Environment) Ended() <-chan struct{} { return e.ended }

// A head keeps the first bytes that are written to it.
type head struct {
	mu   sync.Mutex
	text []byte
}

// maxOutput is what is kept of the agent's own output, which explains why it could not start.
const maxOutput = 4 << 10

func (t *head) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b[:min(len(b), maxOutput-len(t.text))]...)
	return len(b), nil
}

func (t *head) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}
