// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
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
