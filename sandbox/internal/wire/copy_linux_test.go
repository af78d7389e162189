// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"os"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestPipesAreReadWithoutWaiting: somebody else may have taken what poll reported.
func TestPipesAreReadWithoutWaiting(t *testing.T) {
	r, w, err := os.Pipe()
	must.Succeed(t, err)
	defer r.Close()
	defer w.Close()
	if _, err := unix.Preadv2(int(r.Fd()), [][]byte{make([]byte, 1)}, -1, unix.RWF_NOWAIT); err == unix.EOPNOTSUPP {
		t.Skip("this kernel cannot read pipes without waiting")
	}
	if n, err := reader(int(r.Fd()))(make([]byte, 1)); err != unix.EAGAIN {
		t.Errorf("an empty pipe: got %d, %v, want %v", n, err, unix.EAGAIN)
	}
}
