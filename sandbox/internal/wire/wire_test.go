// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// frame returns a frame with some bytes of data.
func frame(kind byte, port uint64, n uint32, data int) []byte {
	head := binary.LittleEndian.AppendUint64([]byte{kind}, port)
	return append(binary.LittleEndian.AppendUint32(head, n), make([]byte, data)...)
}

// TestHostileFramesAreRefused: the other side can neither make this one keep more than it has room for, nor send more
// than it may, nor use ports that this side has not opened.
func TestHostileFramesAreRefused(t *testing.T) {
	const full = Window / 2
	for name, c := range map[string]struct {
		frames []byte
		want   string
	}{
		"another port":         {frame(data, 2, 0, 0), "port 2"},
		"another kind":         {frame(3, 0, 0, 0), "kind 3"},
		"too long":             {frame(data, 0, Window+1, 0), "262145 bytes"},
		"huge":                 {frame(data, 0, 1<<32-1, 0), "4294967295 bytes"},
		"a long message":       {frame(message, 0, MaxMessage+1, 0), "131073 bytes"},
		"without credit":       {bytes.Repeat(frame(data, 0, full, full), 3), "without credit"},
		"credit of nothing":    {frame(credit, 0, 1, 0), "a credit of 1 bytes, after 0"},
		"credit, another port": {frame(credit, 5, 1, 0), "port 5"},
		"truncated":            {frame(data, 0, 10, 3), "unexpected EOF"},
		"a truncated message":  {frame(message, 0, 10, 3), "unexpected EOF"},
		"a truncated rest":     {frame(data, 1, 10, 3), "unexpected EOF"},
		"the end":              {frame(data, 1, 10, 10), "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			w := New(io.Discard)
			w.Open(0)
			w.Open(1).Close()
			err := w.Serve(bytes.NewReader(c.frames), func([]byte) error { return nil })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// pair returns the ports of both sides of a stream.
func pair(t *testing.T) (ours, theirs *Port) {
	t.Helper()
	in, out := io.Pipe()
	back, reply := io.Pipe()
	a, b := New(out), New(reply)
	ours, theirs = a.Open(7), b.Open(7)
	go func() { _ = b.Serve(in, nil) }()
	go func() { _ = a.Serve(back, nil) }()
	t.Cleanup(func() { out.Close(); reply.Close() })
	return ours, theirs
}

// TestStreamEnds: the end arrives after everything that was sent, here more than a window.
func TestStreamEnds(t *testing.T) {
	ours, theirs := pair(t)
	want := bytes.Repeat([]byte("0123456789abcdef"), Window/4)
	go func() {
		_, err := ours.Write(want)
		if err := errors.Join(err, ours.End()); err != nil {
			t.Errorf("send: %v", err)
		}
	}()
	var got bytes.Buffer
	must.Succeed(t, theirs.Deliver(&got))
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("got %d bytes, want the %d that were sent", got.Len(), len(want))
	}
}

// failing is a writer that fails.
type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

// TestWriterEndsWithItsReader: if nobody takes what is sent, Write fails like that of a pipe, also while it waits.
func TestWriterEndsWithItsReader(t *testing.T) {
	ours, theirs := pair(t)
	written := make(chan error)
	go func() {
		_, err := ours.Write(make([]byte, 4*Window))
		written <- err
	}()
	if err := theirs.Deliver(failing{}); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("Deliver: got %v, want the error of its writer", err)
	}
	if err := <-written; err != syscall.EPIPE {
		t.Errorf("Write: got %v, want %v", err, syscall.EPIPE)
	}
}

// TestRestIsDelivered: what the other side sent before it ended is delivered, although it takes no more credits.
func TestRestIsDelivered(t *testing.T) {
	w := New(failing{})
	p := w.Open(0)
	if err := w.Serve(bytes.NewReader(slices.Concat(frame(data, 0, 5, 5), frame(data, 0, 0, 0))), nil); err != io.EOF {
		t.Fatalf("got %v, want EOF", err)
	}
	var got bytes.Buffer
	must.Succeed(t, p.Deliver(&got))
	if got.Len() != 5 {
		t.Errorf("got %d bytes, want 5", got.Len())
	}
}

// TestCloseWakes: Close ends Write without credit, and Deliver.
func TestCloseWakes(t *testing.T) {
	p := New(io.Discard).Open(0)
	ended := make(chan error)
	go func() {
		_, err := p.Write(make([]byte, 2*Window))
		ended <- err
	}()
	go func() { ended <- p.Deliver(io.Discard) }()
	p.Close()
	for range 2 {
		if err := <-ended; err != os.ErrClosed {
			t.Errorf("got %v, want %v", err, os.ErrClosed)
		}
	}
}
