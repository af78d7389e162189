// SPDX-License-Identifier: Apache-2.0

package server

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPipeInPlaceOfDrainsIsRefused: opening it would wait until somebody writes to it.
func TestPipeInPlaceOfDrainsIsRefused(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, syscall.Mkfifo(drainsPath(dir), 0o600))
	_, err := readDrains(dir)
	expect.Error(t, err, durable.ErrNotRegular, "read %s", filepath.Base(drainsPath(dir)))
}
