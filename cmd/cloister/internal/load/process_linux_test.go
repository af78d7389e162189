// SPDX-License-Identifier: Apache-2.0

package load

import (
	"crypto/sha256"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestUsage compares what /proc says of this process with what the kernel tells it.
func TestUsage(t *testing.T) {
	var sum [32]byte
	for range 1_000_000 { // more than a tick
		sum = sha256.Sum256(sum[:])
	}
	self := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			t.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := self()
	u, err := usageOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// User and system time are rounded each.
	if after := self(); u.cpu < before-2*tick || u.cpu > after+2*tick {
		t.Errorf("CPU time is %v, want %v to %v", u.cpu, before, after)
	}
	if before < 3*tick {
		t.Errorf("this process has used %v only, which shows nothing", before)
	}
	if u.anonymous < 1<<20 || u.peak < u.anonymous {
		t.Errorf("%d bytes are resident at most, %d of no file now", u.peak, u.anonymous)
	}
}
