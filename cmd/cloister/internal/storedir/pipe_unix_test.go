// SPDX-License-Identifier: Apache-2.0

//go:build unix

package storedir

import (
	"errors"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPendingDoesNotWaitForPipe in place of the journal.
func TestPendingDoesNotWaitForPipe(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, syscall.Mkfifo(Journal(dir), 0o600))
	if _, err := Pending(dir); !errors.Is(err, durable.ErrNotRegular) {
		t.Errorf("got %v, want ErrNotRegular", err)
	}
}
