// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox/internal/wire"
)

// serveWire handles requests from a wire.
func (s *server) serveWire() error {
	w := wire.New(os.Stdout)
	var mu sync.Mutex
	calls := map[uint64]*local{}
	var rest sync.WaitGroup // output of commands that have ended
	s.reply = func(r Reply) error {
		mu.Lock()
		c := calls[r.ID]
		delete(calls, r.ID)
		mu.Unlock()
		if c != nil {
			rest.Go(c.end) // the reply must not wait for a slow reader
		}
		return w.Message(Encode(r))
	}
	if err := s.reply(Reply{}); err != nil {
		return err
	}
	err := w.Serve(os.Stdin, func(b []byte) error {
		var r Request
		if err := json.Unmarshal(b, &r); err != nil {
			return fmt.Errorf("request: %w", err)
		}
		switch {
		case r.End:
			go func() {
				s.terminate()
				waitFor(&rest, w.Sent)
				syscall.Exit(0)
			}()
			return nil
		case r.Signal != 0:
			s.signal(&r)
			return nil
		}
		c, theirs, err := openLocal(w, &r)
		defer closeFiles(theirs)
		mu.Lock()
		calls[r.ID] = c
		mu.Unlock()
		if err != nil { // the other commands continue
			stderr := c.ports[len(c.ports)-1]
			_, _ = fmt.Fprintf(stderr, "cloister: create pipes for the command: %v\n", err) // nobody may read it
			return s.reply(Reply{ID: r.ID, Code: 126})
		}
		var fds []int
		for _, f := range theirs {
			fds = append(fds, int(f.Fd())) // blocking, as programs expect
		}
		return s.start(&r, fds)
	})
	if err == io.EOF {
		return nil
	}
	return err
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// waitFor waits for the rest of the output while some of it is taken at least once in lastTime. Sent returns the number
// of sent frames.
func waitFor(rest *sync.WaitGroup, sent func() int64) {
	done := make(chan struct{})
	go func() {
		rest.Wait()
		close(done)
	}()
	for before := int64(-1); sent() != before; {
		before = sent()
		select {
		case <-done:
			return
		case <-time.After(lastTime):
		}
	}
}

// A local is the streams of a command in the agent's kernel.
type local struct {
	ports   []*wire.Port // stdin, then outputs
	stdin   *os.File     // nil, without outputs, if there are no pipes
	outputs []*os.File
	copying sync.WaitGroup // of outputs
}

// openLocal makes the pipes of a command and connects them with its ports. theirs are the command's ends. It opens the
// ports even if it fails, since the other side has opened them.
func openLocal(w *wire.Wire, r *Request) (c *local, theirs []*os.File, err error) {
	streams := 3
	if r.Joined {
		streams = 2
	}
	c = &local{}
	for i := range streams {
		c.ports = append(c.ports, w.Open(port(r.ID, i)))
	}
	var ours []*os.File
	for i := range streams {
		read, write, err := os.Pipe()
		if err != nil {
			closeFiles(slices.Concat(ours, theirs))
			return c, nil, err
		}
		if i == 0 {
			read, write = write, read
		}
		ours, theirs = append(ours, read), append(theirs, write)
	}
	if r.Joined {
		theirs = append(theirs, theirs[1])
	}
	c.stdin, c.outputs = ours[0], ours[1:]
	go func() {
		_ = c.ports[0].Deliver(c.stdin) // the command may have closed it
		c.stdin.Close()
	}()
	for i, from := range c.outputs {
		c.copying.Go(func() { _ = wire.CopyOutput(c.ports[i+1], from) }) // nobody may want it any more
	}
	return c, theirs, nil
}

// end ends the streams once everything that the command has written is sent.
func (c *local) end() {
	for _, r := range c.outputs {
		_ = r.SetReadDeadline(time.Unix(1, 0)) // it may be closed
	}
	c.stdin.Close()
	c.copying.Wait()
	for i, p := range c.ports {
		if i > 0 {
			_ = p.End() // the host may have ended
		}
		p.Close()
	}
}
