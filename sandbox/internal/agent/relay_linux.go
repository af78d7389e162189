// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// A relay takes the place of an agent at a socket.
type relay struct {
	sock int
	wire *wire.Wire

	mu    sync.Mutex
	calls map[uint64]*remote // commands whose output has not ended; nil when the agent has
	ended bool               // the socket is about to be closed
	last  sync.WaitGroup     // output of commands that have ended
}

// A remote is the streams of a command of another kernel.
type remote struct {
	replied bool     // guarded by relay.mu
	wake    *os.File // ends the copying of stdin when it is closed
	stdin   *wire.Port
	outputs []*wire.Port
	serving sync.WaitGroup // of outputs
}

// Relay passes what it receives from sock, as an agent would, on to the agent whose stdout is in and whose stdin is out,
// and its replies back. When sock is shut down, it ends the agent. It returns at the end of in, with an error if what it
// read is invalid. The caller closes sock.
func Relay(sock int, in io.Reader, out io.WriteCloser) error {
	r := &relay{sock: sock, wire: wire.New(out), calls: map[uint64]*remote{}}
	requests := make(chan error, 1)
	go func() {
		err := r.serve()
		if err != nil || r.wire.Message(Encode(Request{End: true})) != nil {
			out.Close()
		}
		requests <- err
	}()
	err := r.wire.Serve(in, r.message)
	out.Close()
	r.end()
	if err == io.EOF {
		err = nil
	}
	return errors.Join(err, <-requests)
}

// serve passes requests on until the socket is shut down.
func (r *relay) serve() error {
	for {
		packet, fds, err := zygote.Receive(r.sock)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		var q Request
		if err := json.Unmarshal(packet, &q); err != nil || q.Signal == 0 && len(fds) != 3 {
			closeAll(fds)
			return fmt.Errorf("request with %d descriptors: %w", len(fds), err)
		}
		if q.Signal != 0 {
			if err := r.wire.Message(packet); err != nil {
				return nil //nolint:nilerr // the agent has ended
			}
			continue
		}
		if err := r.start(&q, packet, fds); err != nil {
			return err
		}
	}
}

// start passes the request of a command on, and copies its streams.
func (r *relay) start(q *Request, packet []byte, fds []int) error {
	read, wake, err := os.Pipe()
	if err != nil {
		closeAll(fds)
		return err
	}
	c := &remote{wake: wake, stdin: r.wire.Open(port(q.ID, 0))}
	if q.Joined {
		unix.Close(fds[2])
		fds = fds[:2]
	}
	for i, fd := range fds[1:] {
		p := r.wire.Open(port(q.ID, i+1))
		c.outputs = append(c.outputs, p)
		c.serving.Go(func() {
			to := os.NewFile(uintptr(fd), "output")
			_ = p.Deliver(to) // its reader may be gone
			to.Close()
		})
	}
	sent := make(chan struct{})
	go func() { // not in serving: if somebody else reads this stdin, too, it may wait for more
		<-sent
		wire.CopyInput(c.stdin, fds[0], read)
		_ = c.stdin.End() // the agent may have ended
		read.Close()
		unix.Close(fds[0])
	}()
	r.mu.Lock()
	if r.calls == nil {
		c.finish()
		go c.end()
	} else {
		r.calls[q.ID] = c
	}
	r.mu.Unlock()
	_ = r.wire.Message(packet) // likewise
	close(sent)
	return nil
}

// message handles a message of the agent, which is not trusted: a reply that nobody waits for is dropped. A reply is
// passed on at once, although the rest of the command's output arrives later.
func (r *relay) message(b []byte) error {
	var reply Reply
	if err := json.Unmarshal(b, &reply); err != nil {
		return fmt.Errorf("reply: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if reply.ID == 0 {
		return sendReady(r.sock)
	}
	c := r.calls[reply.ID]
	if c == nil || c.replied {
		return nil
	}
	c.replied = true
	r.last.Go(func() {
		c.end()
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.calls, reply.ID)
	})
	if !r.ended {
		_ = zygote.Send(r.sock, Encode(reply)) // nobody may wait for it
	}
	return nil
}

// finish ends the outputs after what has arrived.
func (c *remote) finish() {
	for _, p := range c.outputs {
		p.Finish()
	}
}

// end ends the streams once all output is written.
func (c *remote) end() {
	c.wake.Close()
	c.stdin.Close()
	c.serving.Wait()
	for _, p := range c.outputs {
		p.Close()
	}
}

// lastTime is the time for the readers of commands to take the rest of the output when the agent has ended.
const lastTime = time.Second

// end ends all calls, and the use of the socket.
func (r *relay) end() {
	r.mu.Lock()
	for _, c := range r.calls {
		c.finish()
		if !c.replied {
			r.last.Go(c.end)
		}
	}
	r.calls = nil
	r.mu.Unlock()
	done := make(chan struct{})
	go func() {
		r.last.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(lastTime): // a reader may block
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	_ = unix.Shutdown(r.sock, unix.SHUT_RDWR)
}
