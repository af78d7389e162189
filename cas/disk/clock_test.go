// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const (
	clockLease = 2 * time.Hour
	year       = 365 * 24 * time.Hour
	leased     = 20 // blobs that leasedStore puts
)

// leasedStore opens a store with room for few more blobs than it puts.
func leasedStore(t *testing.T) (disk.Config, *disk.Cache) {
	t.Helper()
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 32 * block, Lease: clockLease}
	c := open(t, config)
	for i := range byte(leased) {
		put(t, store(t, c, ""), i)
	}
	return config, c
}

// wantLeased fills the store, and tests that its first blobs are all there.
func wantLeased(t *testing.T, c *disk.Cache, from int) {
	t.Helper()
	expect.That(t, fill(t, store(t, c, ""), from, 100) != 100, "the store is never full")
	if got := present(t, store(t, c, ""), leased); len(got) != leased {
		t.Errorf("of %d leased blobs, only %v are left", leased, got)
	}
}

// wantExpired tests that a full store evicts blobs after all its leases have ended.
func wantExpired(t *testing.T, c *disk.Cache, from int) {
	t.Helper()
	for i := range 30 {
		if err := putOther(t, store(t, c, ""), from+i); err != nil {
			t.Fatalf("put %d after all leases: %v", i, err)
		}
		time.Sleep(clockLease / 8)
	}
}

// TestSuspensionDoesNotEndLeases suspends the machine for longer than a lease: the users who renew it were suspended,
// too. Nor do the leases last for longer afterwards.
func TestSuspensionDoesNotEndLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, c := leasedStore(t)
		time.Sleep(clockLease / 2)
		disk.Suspend(t, 10*clockLease)
		c.Maintain()
		wantLeased(t, c, leased)
		time.Sleep(2 * clockLease)
		wantExpired(t, c, 200)
	})
}

// TestWallClockDoesNotEndLeases sets the wall clock while the store is open.
func TestWallClockDoesNotEndLeases(t *testing.T) {
	for _, jump := range []time.Duration{year, -year, 2 * time.Second, -2 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			_, c := leasedStore(t)
			disk.SetWall(t, jump)
			time.Sleep(time.Second)
			c.Maintain()
			wantLeased(t, c, 0)
			// Leases of blobs that were used meanwhile end, too.
			disk.SetWall(t, 0)
			c.Maintain()
			time.Sleep(clockLease + clockLease/8 + 2*time.Second)
			wantExpired(t, c, 1000)
		})
	}
}

// TestWallClockBetweenProcesses sets the wall clock between two processes: leases neither end nor last for ever. With
// killed, the earlier process had no time to note when it ended.
func TestWallClockBetweenProcesses(t *testing.T) {
	for _, jump := range []time.Duration{year, -year, time.Minute, -time.Minute} {
		for _, restarted := range []bool{false, true} {
			for _, killed := range []bool{false, true} {
				t.Run(fmt.Sprintf("jump=%v,restarted=%v,killed=%v", jump, restarted, killed), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						disk.SetWall(t, 2*year)
						config, c := leasedStore(t)
						time.Sleep(clockLease / 2)
						if killed {
							config.Dir = restore(t, snapshot(t, config.Dir))
						} else {
							closeStore(t, c)
						}
						disk.SetWall(t, 2*year+jump)
						if restarted {
							disk.Restart(t)
						}
						closeStore(t, open(t, config)) // a short process, such as a command
						c = open(t, config)
						wantLeased(t, c, 0)
						time.Sleep(clockLease + clockLease/8 + 2*time.Second)
						wantExpired(t, c, 1000)
					})
				})
			}
		}
	}
}

// TestLeasesEndWhileNothingRuns: without a restart of the machine, the store knows how much time has passed.
func TestLeasesEndWhileNothingRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config, c := leasedStore(t)
		closeStore(t, c)
		time.Sleep(clockLease + clockLease/8 + 2*time.Second)
		wantExpired(t, open(t, config), 0)
	})
}

// TestStampsFromTheFutureKeepTheirAges: after a process whose clock was a year ahead, what it used last is evicted
// last.
func TestStampsFromTheFutureKeepTheirAges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := disk.Config{Dir: t.TempDir(), MaxBytes: 64 * block, Lease: none, Pack: everyFile}
		disk.SetWall(t, year)
		c := open(t, config)
		for i := range byte(40) {
			put(t, store(t, c, ""), i)
			time.Sleep(5 * time.Hour)
		}
		for _, ahead := range []time.Duration{0, 0} {
			closeStore(t, c)
			disk.SetWall(t, ahead)
			c = open(t, config)
		}
		must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: 100 * time.Hour}))(t)
		if got := present(t, store(t, c, ""), 40); len(got) < 19 || len(got) > 21 || got[0] != 40-byte(len(got)) {
			t.Errorf("of 40 blobs used every 5 hours, %v are left after eviction of those older than 100 hours", got)
		}
	})
}

// TestDamagedCheckpoint: Open survives any content of the checkpoint.
func TestDamagedCheckpoint(t *testing.T) {
	for _, text := range []string{"", "end\n", "clock 1 until 2\nend\n", "clock x\n", "\x00\x00\x00", "clock 1 until 2 uptime 3 boot x\nlog 1\nend\n"} {
		config, c := leasedStore(t)
		closeStore(t, c)
		write(t, config.Dir+"/checkpoint", text)
		c = open(t, config)
		if got := present(t, store(t, c, ""), leased); len(got) != leased {
			t.Errorf("%q: got %v", text, got)
		}
		closeStore(t, c)
	}
}
