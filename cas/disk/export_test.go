// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"os"
	"sync/atomic"
	"time"
)

// ahead is by how much SetWall has moved the wall clock, and suspended for how long Suspend has suspended the machine.
// Stores read them at any time.
var ahead, suspended atomic.Int64

// In tests, the machine has a boot ID, and has been up since 1970 on the clock of the test, unless Restart was called.
func init() {
	if bootID() == "" {
		thisBoot = func() string { return "only-boot" }
	}
	uptime = func() int64 { return time.Now().Unix() }
	wall = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	sleepTime = func() time.Duration { return asleep() + time.Duration(suspended.Load()) }
}

// Maintain runs the periodic maintenance once.
func (c *Cache) Maintain() { c.maintainOnce() }

// replacement is what SetFlush sets.
var replacement atomic.Pointer[func() error]

func init() {
	real := flush
	flush = func(f *os.File) error {
		if r := replacement.Load(); r != nil {
			return (*r)()
		}
		return real(f)
	}
}

// SetFlush replaces the flush of the disk, until the test ends.
func SetFlush(t interface{ Cleanup(func()) }, f func() error) {
	replacement.Store(&f)
	t.Cleanup(func() { replacement.Store(nil) })
}

// SetWall moves the wall clock, until the test ends or SetWall is called again.
func SetWall(t interface{ Cleanup(func()) }, by time.Duration) {
	ahead.Store(int64(by))
	t.Cleanup(func() { ahead.Store(0) })
}

// Suspend suspends the machine for a time on its clock.
func Suspend(t interface{ Cleanup(func()) }, by time.Duration) {
	suspended.Add(int64(by))
	t.Cleanup(func() { suspended.Add(int64(-by)) })
}

// Restart restarts the machine, without a loss of power: its uptime begins again.
func Restart(t interface{ Cleanup(func()) }) {
	was, began := uptime, time.Now()
	uptime = func() int64 { return 1 + int64(time.Since(began)/time.Second) }
	t.Cleanup(func() { uptime = was })
}

// SetAdoptAtOpen makes Open adopt at most n bytes, until the test ends.
func SetAdoptAtOpen(t interface{ Cleanup(func()) }, n int64) {
	was := adoptAtOpen
	adoptAtOpen = n
	t.Cleanup(func() { adoptAtOpen = was })
}
