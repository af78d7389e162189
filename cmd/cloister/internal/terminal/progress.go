// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"fmt"
	"io"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// A Progress is a status line on a terminal: bytes that are done, their rate and the time left. It is nil, and shows
// nothing, elsewhere. One goroutine uses it.
type Progress struct {
	w     io.Writer
	label string
	begun time.Time // of the first call of Show
	first int64     // the bytes that were done then
}

// NewProgress returns a Progress on w, which begins with a label.
func NewProgress(w io.Writer, label string) *Progress {
	if !Is(w) {
		return nil
	}
	return &Progress{w: w, label: label}
}

// Say replaces the line with a text after the label.
func (p *Progress) Say(text string) {
	if p != nil {
		fmt.Fprint(p.w, "\r\x1b[K"+p.label+text)
	}
}

// Show replaces the line. Done bytes include those that were done before the first call, which do not count towards the
// rate. A total of 0 is unknown.
func (p *Progress) Show(done, total int64, more string) {
	if p == nil {
		return
	}
	if p.begun.IsZero() {
		p.begun, p.first = time.Now(), done
	}
	text := sandbox.Bytes(done)
	if total > 0 {
		text += " of " + sandbox.Bytes(total)
	}
	p.Say(text + estimate(done-p.first, total-done, time.Since(p.begun)) + more)
}

// Clear removes the line.
func (p *Progress) Clear() {
	if p != nil {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// trackInterval is the interval at which a tracked reader updates the line.
const trackInterval = 200 * time.Millisecond

// Track returns a reader of r that shows how much of total bytes was read.
func (p *Progress) Track(r io.ReadSeeker, total int64) io.ReadSeeker {
	if p == nil {
		return r
	}
	return &tracked{ReadSeeker: r, progress: p, total: total}
}

type tracked struct {
	io.ReadSeeker
	progress  *Progress
	at, total int64
	shown     time.Time
}

// Read implements io.Reader.
func (t *tracked) Read(b []byte) (int, error) {
	n, err := t.ReadSeeker.Read(b)
	if t.at += int64(n); time.Since(t.shown) >= trackInterval {
		t.progress.Show(t.at, t.total, "")
		t.shown = time.Now()
	}
	return n, err
}

// Seek implements io.Seeker.
func (t *tracked) Seek(offset int64, whence int) (int64, error) {
	at, err := t.ReadSeeker.Seek(offset, whence)
	if err == nil {
		t.at = at
	}
	return at, err
}

// estimate returns the rate of what is done, and when the rest will be, as far as that is known.
func estimate(done, rest int64, took time.Duration) string {
	if done <= 0 || took < time.Second {
		return ""
	}
	rate := float64(done) / took.Seconds()
	text := " · " + sandbox.Bytes(int64(rate)) + "/s"
	if left := float64(rest) / rate; rest > 0 && left < (1000*time.Hour).Seconds() {
		text += " · " + (time.Duration(left+0.5) * time.Second).String() + " left"
	}
	return text
}
