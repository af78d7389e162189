// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"os"

	"golang.org/x/sys/unix"
)

// stateOf returns the state of f, or the zero state on failure. It does not allocate.
func stateOf(f *os.File) state {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return state{}
	}
	return state{st.Size, st.Mtim.Nano()}
}
