// SPDX-License-Identifier: Apache-2.0

package persistent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// A Process is a tool that stays alive between requests. Its methods except Alive and Close are called by one goroutine
// at a time.
type Process struct {
	codec  codec
	stdin  *os.File
	stderr tail
	stop   context.CancelFunc
	// answers delivers what the process writes. It is unbuffered: an answer waits until it is received.
	answers chan answer
	ending  chan struct{} // closed when the process is about to be killed
	ended   chan struct{} // closed when the process is gone and result is set
	once    sync.Once
	result  *sandbox.Result
	err     error
}

type answer struct {
	Response
	err error
}

// Start starts a process with run, which returns when the process exits or run's context ends. The process outlives
// ctx, of which Start uses only the values. It speaks JSON or protocol buffers.
func Start(ctx context.Context, json bool, run func(context.Context, sandbox.Stdio) (*sandbox.Result, error)) (*Process, error) {
	stdin, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("stdin of a persistent worker: %w", err)
	}
	p := &Process{
		codec: protocolBuffers{}, stdin: w, answers: make(chan answer), ending: make(chan struct{}), ended: make(chan struct{}),
	}
	if json {
		p.codec = lines{}
	}
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
	stdout, out := io.Pipe()
	go func() {
		p.result, p.err = run(ctx, sandbox.Stdio{Stdin: stdin, Stdout: out, Stderr: &p.stderr})
		stdin.Close()
		close(p.ended)
		out.Close()
	}()
	go p.read(bufio.NewReader(stdout))
	return p, nil
}

// read delivers the answers of the process until one is an error. Then it discards the rest, so that the run can end.
func (p *Process) read(r *bufio.Reader) {
	for {
		var a answer
		a.Response, a.err = p.codec.decode(r)
		select {
		case p.answers <- a:
		case <-p.ending:
			a.err = io.EOF
		}
		if a.err != nil {
			_, _ = io.Copy(io.Discard, r)
			return
		}
	}
}

// A Failure is the error of a request that the process did not answer. The process cannot be used again.
type Failure struct {
	Reason   string // a clause whose subject is the process
	Stderr   string // the end of its stderr since the request began
	TimedOut bool
	Result   *sandbox.Result // how the process ended, or nil if that is unknown
}

func (f *Failure) Error() string { return "the persistent worker failed: " + f.Reason }

// Do sends a request and waits at most timeout until the process has read it and responded. If ctx ends, the error is
// its cause, if the sandbox failed that of the run, and otherwise a *Failure; the process is killed in all cases.
func (p *Process) Do(ctx context.Context, r *Request, timeout time.Duration) (Response, error) {
	p.stderr.reset()
	select {
	case a := <-p.answers:
		if a.err == nil {
			a.err = errors.New("it sent a response without a request")
		}
		return Response{}, p.fail(a.err)
	default:
	}
	b, err := p.codec.encode(r)
	if err != nil {
		return Response{}, p.fail(err)
	}
	answers, read := p.answers, make(chan struct{})
	go func() {
		_, _ = p.stdin.Write(b) // if it fails, the process has ended
		close(read)
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	var response Response
	for answers != nil || read != nil {
		select {
		case a := <-answers:
			if a.err != nil {
				return Response{}, p.fail(a.err)
			}
			response, answers = a.Response, nil
		case <-read:
			read = nil
		case <-ctx.Done():
			p.Close()
			return Response{}, context.Cause(ctx)
		case <-timer.C:
			f := p.failure(fmt.Sprintf("it did not respond within %v", timeout))
			f.TimedOut = true
			return Response{}, f
		}
	}
	return response, nil
}

// failure ends the process and returns the Failure.
func (p *Process) failure(reason string) *Failure {
	p.Close()
	return &Failure{Reason: reason, Stderr: p.stderr.String(), Result: p.result}
}

// fail ends the process and returns why err is the end of its answers: a Failure, unless the sandbox failed.
func (p *Process) fail(err error) error {
	f := p.failure(err.Error())
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return f
	}
	switch r := p.result; {
	case p.err != nil:
		return p.err
	case r.Signal != 0:
		f.Reason = fmt.Sprintf("it was killed by signal %d (%v) before it responded", int(r.Signal), r.Signal)
	default:
		f.Reason = fmt.Sprintf("it exited with code %d before it responded", r.ExitCode)
	}
	return f
}

// Alive reports whether the process waits for a request: it has not ended, and has written nothing without a request.
func (p *Process) Alive() bool {
	select {
	case <-p.ended:
		return false
	case <-p.ending:
		return false
	case <-p.answers:
		return false
	default:
		return true
	}
}

// Close kills the process, waits for its end and returns how it ended, nil if that is unknown. It may be called
// repeatedly.
func (p *Process) Close() *sandbox.Result {
	p.once.Do(func() {
		close(p.ending)
		p.stop()
		p.stdin.Close()
	})
	<-p.ended
	return p.result
}

// A tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

// A tail keeps the last maxTail bytes, or up to twice as many.
const maxTail = 16 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.text = append(t.text, b...); len(t.text) > 2*maxTail {
		t.text = append(t.text[:0], t.text[len(t.text)-maxTail:]...)
	}
	return len(b), nil
}

func (t *tail) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = t.text[:0]
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}
