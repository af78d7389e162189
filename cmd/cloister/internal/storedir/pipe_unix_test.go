// SPDX-License-Identifier: Apache-2.0

//go:build unix

package storedir

import (
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPendingDoesNotWaitForPipe in place of the journal.
func TestPendingDoesNotWaitForPipe(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, syscall.Mkfifo(Journal(dir), 0o600))
	expect.Error(t, expect.Err(Pending(dir)), durable.ErrNotRegular)
}
