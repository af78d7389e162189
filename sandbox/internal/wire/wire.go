// SPDX-License-Identifier: Apache-2.0

// Package wire carries numbered streams and messages over one byte stream in each direction, such as the stdin and
// stdout of a run. The other side is not trusted.
package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
)

// A frame has a header of headSize bytes: its kind in one, a port in eight and a number in four.
const headSize = 13

// Kinds of frames.
const (
	data    = iota // the number is the length of the data that follows; 0 is the end of the stream
	credit         // the number of additional bytes that the other side may send; 0 means that it shall send no more
	message        // the number is the length of the message that follows; there is no port
)

const (
	// Window is the number of bytes of a port that a side sends before the other one has delivered them, so that a slow
	// reader of one port does not stall the others.
	Window = 256 << 10
	// maxData bounds the data of a frame, so that ports take turns.
	maxData = 32 << 10
	// MaxMessage bounds a message, in bytes.
	MaxMessage = 128 << 10
)

// SameWriter reports whether a and b are the same writer, which then gets one stream. It compares only values that are
// comparable, since others would panic.
func SameWriter(a, b io.Writer) bool {
	return a != nil && b != nil && reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// A Wire is one side. Its methods are safe for concurrent use.
type Wire struct {
	mu      sync.Mutex
	ports   map[uint64]*Port
	highest uint64 // port that was ever open, plus one

	sent    atomic.Int64
	sending sync.Mutex
	out     io.Writer
}

// New returns a Wire that writes to out.
func New(out io.Writer) *Wire { return &Wire{out: out, ports: map[uint64]*Port{}} }

// A Port is this side of a stream in both directions.
type Port struct {
	w      *Wire
	number uint64

	mu       sync.Mutex
	changed  sync.Cond
	credit   int    // bytes that may be sent
	unwanted bool   // the other side takes no more
	got      []byte // that are to be delivered
	last     bool   // nothing more arrives
	closed   bool
}

// Open opens a port, whose number must be new. The other side may send to it from then on.
func (w *Wire) Open(number uint64) *Port {
	p := &Port{w: w, number: number, credit: Window}
	p.changed.L = &p.mu
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ports[number], w.highest = p, max(w.highest, number+1)
	return p
}

// Close ends Write and Deliver with os.ErrClosed and drops what arrives later.
func (p *Port) Close() {
	p.w.mu.Lock()
	delete(p.w.ports, p.number)
	p.w.mu.Unlock()
	p.update(func() { p.closed = true })
}

// Finish makes Deliver return once it has delivered what has arrived.
func (p *Port) Finish() { p.update(func() { p.last = true }) }

// update changes the port and wakes those that wait for that.
func (p *Port) update(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	p.changed.Broadcast()
}

// Write sends b as far as there is credit, for which it waits. It returns EPIPE if the other side takes no more.
func (p *Port) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		p.mu.Lock()
		for p.credit == 0 && !p.unwanted && !p.closed {
			p.changed.Wait()
		}
		n := min(len(b)-done, p.credit, maxData)
		p.credit -= n
		unwanted, closed := p.unwanted, p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return done, os.ErrClosed
		case unwanted:
			return done, syscall.EPIPE
		}
		if err := p.w.send(data, p.number, n, b[done:done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return len(b), nil
}

// End sends the end of the stream.
func (p *Port) End() error { return p.w.send(data, p.number, 0, nil) }

// Deliver writes what arrives to dst, until the end of the stream. If dst fails, it returns that error and tells the
// other side to send no more.
func (p *Port) Deliver(dst io.Writer) error {
	var b []byte
	for {
		p.mu.Lock()
		for len(p.got) == 0 && !p.last && !p.closed {
			p.changed.Wait()
		}
		b, p.got = p.got, b[:0]
		closed := p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return os.ErrClosed
		case len(b) == 0:
			return nil
		}
		if _, err := dst.Write(b); err != nil {
			p.update(func() { p.last = true })
			return errors.Join(err, p.w.send(credit, p.number, 0, nil))
		}
		_ = p.w.send(credit, p.number, len(b), nil) // if the other side has ended, what it sent before is still delivered
	}
}

// Message sends a message.
func (w *Wire) Message(b []byte) error { return w.send(message, 0, len(b), b) }

func (w *Wire) send(kind byte, port uint64, n int, b []byte) error {
	frame := make([]byte, headSize, headSize+len(b))
	frame[0] = kind
	binary.LittleEndian.PutUint64(frame[1:], port)
	binary.LittleEndian.PutUint32(frame[9:], uint32(n))
	w.sending.Lock()
	defer w.sending.Unlock()
	_, err := w.out.Write(append(frame, b...))
	w.sent.Add(1)
	return err
}

// Sent returns the number of frames that were sent.
func (w *Wire) Sent() int64 { return w.sent.Load() }

// Serve distributes the frames that arrive on in, until its end, for which it returns io.EOF, or an invalid frame. It
// passes messages to handle, in their order, unless that is nil.
func (w *Wire) Serve(in io.Reader, handle func([]byte) error) error {
	r := bufio.NewReaderSize(in, maxData)
	var head [headSize]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		kind, port, n := head[0], binary.LittleEndian.Uint64(head[1:]), int64(binary.LittleEndian.Uint32(head[9:]))
		if kind == message && handle != nil && n <= MaxMessage {
			b := make([]byte, n)
			if _, err := io.ReadFull(r, b); err != nil {
				return noEOF(err)
			}
			if err := handle(b); err != nil {
				return err
			}
			continue
		}
		w.mu.Lock()
		p, highest := w.ports[port], w.highest
		w.mu.Unlock()
		if kind > credit || port >= highest || n > Window {
			return fmt.Errorf("a frame of kind %d for port %d of %d bytes", kind, port, n)
		}
		var err error
		switch {
		case p == nil && kind == data: // it was closed before this was sent
			_, err = io.CopyN(io.Discard, r, n)
		case p == nil:
		case kind == data:
			err = p.receive(r, n)
		default:
			err = p.grant(n)
		}
		if err != nil {
			return noEOF(err)
		}
	}
}

// noEOF returns err, which is not io.EOF for a stream that ends inside a frame.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// receive keeps data for Deliver.
func (p *Port) receive(r io.Reader, n int64) error {
	p.mu.Lock()
	room := int64(Window - len(p.got)) // the data being delivered is bounded by another window
	p.mu.Unlock()
	if n > room {
		return fmt.Errorf("port %d: %d bytes without credit", p.number, n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	p.update(func() {
		if n == 0 {
			p.last = true
		}
		if !p.last {
			p.got = append(p.got, b...)
		}
	})
	return nil
}

// grant adds credit.
func (p *Port) grant(n int64) error {
	p.mu.Lock()
	spent := int64(Window - p.credit)
	p.mu.Unlock()
	if n > spent {
		return fmt.Errorf("port %d: a credit of %d bytes, after %d were sent", p.number, n, spent)
	}
	p.update(func() {
		p.credit += int(n)
		p.unwanted = p.unwanted || n == 0
	})
	return nil
}
