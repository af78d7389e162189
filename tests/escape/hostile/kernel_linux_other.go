// SPDX-License-Identifier: Apache-2.0

//go:build linux && !amd64

package main

// machineCalls are calls of this architecture.
var machineCalls map[string][4]int

// foreign does nothing on this architecture.
func foreign(r *report, _ []string) { r.hold("this architecture has only one table of calls") }
