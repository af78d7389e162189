// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package monitor

// Start returns a Monitor of nothing: only Linux notifies system calls.
func Start(_ int, v Config) *Monitor {
	r := newMonitor(v)
	close(r.done)
	return r
}
