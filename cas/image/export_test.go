// SPDX-License-Identifier: Apache-2.0

package image

import "time"

// The registries of tests are slow when the machine is.
func init() { maxQuery = time.Minute }

// SetMaxStall sets the maximum time that a pull makes no progress, and returns a function that restores it.
func SetMaxStall(d time.Duration) (restore func()) {
	interval, stall := reportInterval, maxStall
	reportInterval, maxStall = d/2, d
	return func() { reportInterval, maxStall = interval, stall }
}

// SetClock sets the clock that detects stalled pulls and the interval at which it is read, and returns a function that
// restores both.
func SetClock(c func() time.Time, every time.Duration) (restore func()) {
	interval, old := reportInterval, clock
	reportInterval, clock = every, c
	return func() { reportInterval, clock = interval, old }
}

// SetMaxQuery sets the maximum time of a query, and returns a function that restores it.
func SetMaxQuery(d time.Duration) (restore func()) {
	old := maxQuery
	maxQuery = d
	return func() { maxQuery = old }
}
