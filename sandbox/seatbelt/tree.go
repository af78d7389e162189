// SPDX-License-Identifier: Apache-2.0

package seatbelt

// A process is an entry of the process table.
type process struct {
	pid, parent, group int
	start              int64 // distinguishes it from later processes with its ID
}

// A family is the processes of one run that were seen: those of the group and their descendants, also after they left
// it.
type family struct {
	group int
	known map[int]int64 // their starts
}

// update adds what table has of the family, and returns those that are alive.
func (f *family) update(table []process) []int {
	alive := map[int]bool{}
	for grown := true; grown; { // a child may precede its parent
		grown = false
		for _, p := range table {
			start, seen := f.known[p.pid]
			if !alive[p.pid] && (p.group == f.group || seen && start == p.start || alive[p.parent]) {
				f.known[p.pid], alive[p.pid], grown = p.start, true, true
			}
		}
	}
	var pids []int
	for _, p := range table {
		if alive[p.pid] {
			pids = append(pids, p.pid)
		}
	}
	return pids
}
