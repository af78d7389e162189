// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
)

// TestErrorsAreAboutOneOf the file, this process, or neither.
func TestErrorsAreAboutOneOf(t *testing.T) {
	for _, c := range []struct {
		err              error
		unreadable, ours bool
	}{
		{syscall.EIO, true, false},
		{syscall.EBADMSG, true, false},
		{syscall.EACCES, true, false},
		{syscall.EPERM, true, false},
		{syscall.ENXIO, true, false},
		{syscall.ELOOP, true, false},
		{syscall.EISDIR, true, false},
		{syscall.ENOTDIR, true, false},
		{syscall.ESTALE, true, false},
		{durable.ErrNotRegular, true, false},
		{syscall.EMFILE, false, true},
		{syscall.ENFILE, false, true},
		{syscall.ENOMEM, false, true},
		{syscall.EINTR, false, true},
		{syscall.ENOENT, false, false},
		{syscall.ENOSPC, false, false},
		{syscall.EROFS, false, false},
		{syscall.ETIMEDOUT, false, false},
		{nil, false, false},
	} {
		err := c.err
		if err != nil {
			err = fmt.Errorf("blob: %w", &fs.PathError{Op: "open", Path: "/x", Err: err})
		}
		if Unreadable(err) != c.unreadable || Ours(err) != c.ours {
			t.Errorf("%v: got unreadable %v, ours %v, want %v, %v", c.err, Unreadable(err), Ours(err), c.unreadable, c.ours)
		}
		if err != nil && Reason(err) != c.err.Error() {
			t.Errorf("%v: got the reason %q", c.err, Reason(err))
		}
	}
}
