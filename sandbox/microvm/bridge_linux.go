// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A wire carries all ports between the driver of msb and the guest. Each frame has a header of five bytes: a port and a
// number. The number is the length of the data that follows or, if the bit isCredit is set in the port, a credit: the
// number of additional bytes that the other side may send. A side sends at most window bytes that the other one has not
// yet delivered, so that a slow reader of one port does not stall the others.
const (
	headSize = 5
	isCredit = 0x80
	window   = 256 << 10
)

// A wireEnd is one side of a port on the wire.
type wireEnd struct {
	file *os.File

	mu      sync.Mutex
	changed sync.Cond
	credit  int    // bytes that may be sent
	got     []byte // that are to be written to file
	ended   bool
}

// bridge forwards what is read from each end to the other side of the wire, and what arrives there to the ends, until
// either fails. It closes the ends. It does not close the wire, which may block it: that is up to the caller.
func bridge(in io.Reader, out io.Writer, ends []*os.File) error {
	w := &wire{out: out, failed: make(chan error, 2*len(ends)+1)}
	for _, file := range ends {
		e := &wireEnd{file: file, credit: window}
		e.changed.L = &e.mu
		w.ends = append(w.ends, e)
	}
	for i, e := range w.ends {
		go func() { w.failed <- w.sendFrom(byte(i), e) }()
		go func() { w.failed <- w.deliverTo(byte(i), e) }()
	}
	go func() { w.failed <- w.receive(bufio.NewReaderSize(in, 32<<10)) }()
	err := <-w.failed
	for _, e := range w.ends {
		e.file.Close()
		e.update(func() { e.ended = true })
	}
	return err
}

type wire struct {
	ends   []*wireEnd
	failed chan error

	mu  sync.Mutex
	out io.Writer
}

func (w *wire) send(port byte, n int, data []byte) error {
	frame := make([]byte, headSize, headSize+len(data))
	frame[0] = port
	binary.LittleEndian.PutUint32(frame[1:], uint32(n))
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.out.Write(append(frame, data...))
	return err
}

// update changes the end and wakes those that wait for that.
func (e *wireEnd) update(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
	e.changed.Broadcast()
}

// errEnded is the error of an end whose bridge has failed elsewhere.
var errEnded = errors.New("the bridge has ended")

// sendFrom sends what is read from an end, as far as there is credit.
func (w *wire) sendFrom(port byte, e *wireEnd) error {
	buf := make([]byte, 32<<10)
	for {
		e.mu.Lock()
		for e.credit == 0 && !e.ended {
			e.changed.Wait()
		}
		most, ended := min(len(buf), e.credit), e.ended
		e.mu.Unlock()
		if ended {
			return errEnded
		}
		n, err := e.file.Read(buf[:most])
		if err != nil {
			return fmt.Errorf("port %d: %w", port, err)
		}
		e.update(func() { e.credit -= n })
		if err := w.send(port, n, buf[:n]); err != nil {
			return err
		}
	}
}

// deliverTo writes to an end what has arrived for it, and returns the credit.
func (w *wire) deliverTo(port byte, e *wireEnd) error {
	var data []byte
	for {
		e.mu.Lock()
		for len(e.got) == 0 && !e.ended {
			e.changed.Wait()
		}
		data, e.got = e.got, data[:0]
		ended := e.ended
		e.mu.Unlock()
		if ended {
			return errEnded
		}
		if _, err := e.file.Write(data); err != nil {
			return fmt.Errorf("port %d: %w", port, err)
		}
		if err := w.send(port|isCredit, len(data), nil); err != nil {
			return err
		}
	}
}

// receive distributes the frames that arrive. The other side may be hostile.
func (w *wire) receive(in *bufio.Reader) error {
	var head [headSize]byte
	for {
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return fmt.Errorf("the other side has ended: %w", err)
		}
		port, n := int(head[0]&^isCredit), int64(binary.LittleEndian.Uint32(head[1:]))
		if port >= len(w.ends) || n > window {
			return fmt.Errorf("a frame for port %d of %d bytes", port, n)
		}
		e := w.ends[port]
		e.mu.Lock()
		room := int64(window - len(e.got)) // the data being written is bounded by another window
		spent := int64(window - e.credit)
		e.mu.Unlock()
		if head[0]&isCredit != 0 {
			if n > spent {
				return fmt.Errorf("port %d: a credit of %d bytes, after %d were sent", port, n, spent)
			}
			e.update(func() { e.credit += int(n) })
			continue
		}
		if n > room {
			return fmt.Errorf("port %d: %d bytes without credit", port, n)
		}
		data := make([]byte, n)
		if _, err := io.ReadFull(in, data); err != nil {
			return err
		}
		e.update(func() { e.got = append(e.got, data...) })
	}
}

// socketPair returns two connected sockets. Closing one ends its reads and those of the other.
func socketPair(name string) (a, b *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return os.NewFile(uintptr(pair[0]), name), os.NewFile(uintptr(pair[1]), name), nil
}
