// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/audit"
)

// FuzzRead reads a segment of arbitrary bytes. With fix, each line gets its correct hash, so that the code after the
// check of hashes is reached.
func FuzzRead(f *testing.F) {
	dir, _ := filled(f)
	for _, path := range segments(f, dir) {
		b := must.Get(os.ReadFile(path))(f)
		for _, fix := range []bool{false, true} {
			f.Add(b, fix)
			f.Add(b[:len(b)-10], fix)
			f.Add(bytes.Replace(b, []byte(`"count":2`), []byte(`"count":1e99`), 1), fix)
		}
	}
	f.Add([]byte(`{"seq":1}`+"\n"), true)
	f.Add([]byte("\n\n"), true)
	dir = f.TempDir()
	path := filepath.Join(dir, fmt.Sprintf("%020d.v1.jsonl", 1))
	f.Fuzz(func(t *testing.T, b []byte, fix bool) {
		if fix {
			lines := bytes.Split(b, []byte("\n"))
			for i, l := range lines[:len(lines)-1] {
				lines[i] = rehash(l)
			}
			b = bytes.Join(lines, []byte("\n"))
		}
		must.Succeed(t, os.WriteFile(path, b, 0o600))
		size, last := 0, uint64(0)
		readErr := audit.Read(dir, func(r audit.Record) error {
			expect.That(t, r.Seq == last+1, "entry %d after %d", r.Seq, last)
			expect.That(t, r.Text() != "", "Text returned \"\"")
			r.Lines("")
			last, size = r.Seq, size+len(r.JSON())+1
			return nil
		})
		expect.That(t, readErr == nil || errors.Is(readErr, audit.ErrTampered), "got %v, want ErrTampered", readErr)
		report, err := audit.Verify(dir, "")
		must.Be(t, (err == nil) == (readErr == nil), "Read: %v; Verify: %v", readErr, err)
		if err == nil && (report.Entries != last || int64(size)+report.Unfinished != int64(len(b))) {
			t.Errorf("got %+v for %d bytes, and read %d bytes in %d entries", report, len(b), size, last)
		}
	})
}
