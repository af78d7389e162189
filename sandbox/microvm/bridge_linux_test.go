// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"io"
	"os"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/tests/must"
)

// bridged returns both sides of two ports over one wire.
func bridged(t *testing.T) (ours, theirs []*os.File) {
	t.Helper()
	a, b := socketPairForTest(t)
	for _, side := range []struct {
		wire *os.File
		keep *[]*os.File
	}{{a, &ours}, {b, &theirs}} {
		var ends []*os.File
		for range 2 {
			keep, end := socketPairForTest(t)
			*side.keep, ends = append(*side.keep, keep), append(ends, end)
		}
		go func() { _ = bridge(side.wire, side.wire, ends); side.wire.Close() }() // ends with the test's files
	}
	return ours, theirs
}

func socketPairForTest(t *testing.T) (a, b *os.File) {
	t.Helper()
	a, b, err := socketPair("test")
	must.Succeed(t, err)
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// TestBridgeKeepsPortsApart: a port whose data nobody reads does not stop another one, in either direction, and its data
// arrives once somebody does.
func TestBridgeKeepsPortsApart(t *testing.T) {
	ours, theirs := bridged(t)
	data := bytes.Repeat([]byte("0123456789abcde\n"), wire.Window/4) // four windows
	for _, dir := range []struct{ from, to []*os.File }{{ours, theirs}, {theirs, ours}} {
		written := make(chan error, 1)
		go func() {
			_, err := dir.from[0].Write(data)
			written <- err
		}()
		for range 3 {
			go func() { _, _ = dir.from[1].Write(data) }() // read below
			got := make([]byte, len(data))
			if _, err := io.ReadFull(dir.to[1], got); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("beside a port that nobody reads: got %d bytes, %v", len(got), err)
			}
		}
		select {
		case err := <-written:
			t.Errorf("four windows were sent that nobody reads: %v", err)
		default:
		}
		got := make([]byte, len(data))
		if _, err := io.ReadFull(dir.to[0], got); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("got %d bytes, %v", len(got), err)
		}
		must.Succeed(t, <-written)
	}
}

// TestBridgeEndsWithItsEnds: the end of a port or of the wire ends both sides.
func TestBridgeEndsWithItsEnds(t *testing.T) {
	ours, theirs := bridged(t)
	ours[0].Close()
	for i, f := range slices.Concat(theirs, ours[1:]) {
		if n, err := f.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("end %d: got %d bytes, %v, want EOF", i, n, err)
		}
	}
}
