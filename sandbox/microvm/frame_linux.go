// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
)

const (
	// maxChunk bounds the frames of streams and trees, in bytes.
	maxChunk = 64 << 10
	// maxMessage bounds a JSON request to the guest, and maxAnswer its answer, in bytes. An answer holds a result with
	// every event.
	maxMessage = 32 << 20
	maxAnswer  = 4 << 20
)

// The serial ports of a machine, each a stream in both directions. They are separate, so that a slow reader of one does
// not stop the others. All but portFiles carry frames: a length in four bytes and as many bytes.
const (
	portControl = iota // requests to the guest, and its answers, in JSON
	portTree           // the workspace to the guest, and outputs back
	portFiles          // FUSE requests from the guest, and answers
	portStdout         // stdin to the guest, and stdout back
	portStderr
	ports
)

// portName returns the name of a port in the guest.
func portName(i int) string { return fmt.Sprintf("cloister.%d", i) }

// A port is one end of a serial port. One goroutine at a time receives.
type port struct {
	file *os.File
	in   *bufio.Reader

	mu sync.Mutex // held while sending
}

func newPort(f *os.File) *port { return &port{file: f, in: bufio.NewReaderSize(f, 32<<10)} }

// send sends a frame of several parts.
func (p *port) send(parts ...[]byte) error {
	frame := make([]byte, 4)
	for _, part := range parts {
		frame = append(frame, part...)
	}
	binary.LittleEndian.PutUint32(frame, uint32(len(frame)-4))
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.file.Write(frame)
	return err
}

// end sends the empty frame that ends a stream.
func (p *port) end() error { return p.send() }

// receive returns the next frame, of at most limit bytes.
func (p *port) receive(limit int) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(p.in, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if int64(n) > int64(limit) {
		return nil, fmt.Errorf("a frame of %d bytes, more than %d", n, limit)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(p.in, b)
	return b, err
}

// sendMessage sends v in JSON.
func (p *port) sendMessage(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(text) > maxMessage {
		return fmt.Errorf("a message of %d bytes, more than %d", len(text), maxMessage)
	}
	return p.send(text)
}

// receiveMessage receives at most limit bytes of JSON into v.
func (p *port) receiveMessage(v any, limit int) error {
	text, err := p.receive(limit)
	if err != nil {
		return err
	}
	return json.Unmarshal(text, v)
}

// Write sends bytes of a stream.
func (p *port) Write(b []byte) (int, error) {
	for done := 0; done < len(b); {
		n := min(len(b)-done, maxChunk/2)
		if err := p.send(b[done : done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return len(b), nil
}

// copyTo writes a stream to w until its end. After an error of w, which it returns, it discards the rest. The second
// error is that of the port.
func (p *port) copyTo(w io.Writer) (writeErr, err error) {
	for {
		b, err := p.receive(maxChunk)
		if err != nil || len(b) == 0 {
			return writeErr, err
		}
		if writeErr == nil {
			_, writeErr = w.Write(b)
		}
	}
}
