// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func TestProgressEstimates(t *testing.T) {
	for _, c := range []struct {
		done, rest int64
		took       time.Duration
		want       string
	}{
		{0, 100, time.Minute, ""},
		{1 << 30, 1 << 30, time.Millisecond, ""},
		{100 << 20, 500 << 20, 10 * time.Second, " · 10.0 MiB/s · 50s left"},
		{100 << 20, 0, 10 * time.Second, " · 10.0 MiB/s"},
		{100 << 20, -1, 10 * time.Second, " · 10.0 MiB/s"},
		{1, 1 << 62, time.Hour, " · 0 B/s"},
	} {
		expect.Equal(t, estimate(c.done, c.rest, c.took), c.want, "%d done, %d left", c.done, c.rest)
	}
}

// TestProgressTracksReaders, also of an upload that resumes.
func TestProgressTracksReaders(t *testing.T) {
	var out bytes.Buffer
	r := (&Progress{w: &out}).Track(strings.NewReader("0123456789"), 10)
	must.Get(r.Seek(4, io.SeekStart))(t)
	rest := must.Get(io.ReadAll(r))(t)
	expect.Equal(t, string(rest), "456789", "read")
	expect.Text(t, out.String(), "10 B of 10 B")
	var none *Progress
	plain := strings.NewReader("x")
	expect.That(t, none.Track(plain, 1) == io.ReadSeeker(plain), "without a terminal the reader is another one")
}

// TestProgressIsForTerminals: other files have no status lines.
func TestProgressIsForTerminals(t *testing.T) {
	var out bytes.Buffer
	NewProgress(&out, "pull ").Show(1, 2, "")
	NewProgress(&out, "pull ").Clear()
	expect.Equal(t, out.String(), "", "not a terminal")
	p := &Progress{w: &out, label: "verify   "}
	p.Show(1<<20, 2<<20, " · 3 blobs")
	p.Show(2<<20, 0, "")
	p.Clear()
	expect.Equal(t, out.String(), "\r\x1b[Kverify   1.0 MiB of 2.0 MiB · 3 blobs\r\x1b[Kverify   2.0 MiB\r\x1b[K")
}
