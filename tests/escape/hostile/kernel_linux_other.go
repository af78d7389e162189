// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64

package main

// machineCalls are what only this architecture has.
var machineCalls map[string][4]int

// foreign has no numbers of other architectures to try.
func foreign(r *report, _ []string) { r.hold("one architecture has one table of calls here") }
