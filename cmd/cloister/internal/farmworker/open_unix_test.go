// SPDX-License-Identifier: Apache-2.0

//go:build unix

package farmworker

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestStoreIDDoesNotWaitForPipe checks that a pipe in place of the file is an error.
func TestStoreIDDoesNotWaitForPipe(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, syscall.Mkfifo(filepath.Join(dir, "worker.id"), 0o600))
	expect.Error(t, expect.Err(storeID(dir)), durable.ErrNotRegular)
}
