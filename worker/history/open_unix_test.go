// SPDX-License-Identifier: Apache-2.0

//go:build unix

package history

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/tests/must"
)

// TestOpenDoesNotWaitForPipe in place of a segment.
func TestOpenDoesNotWaitForPipe(t *testing.T) {
	dir := t.TempDir()
	path := durable.Segments{Dir: dir, Suffix: suffix}.Path(1)
	must.Succeed(t, syscall.Mkfifo(path, 0o600))
	if _, err := Open(Config{Dir: dir}); !errors.Is(err, durable.ErrNotRegular) || !strings.Contains(err.Error(), filepath.Base(path)) {
		t.Errorf("got %v, want ErrNotRegular naming the segment", err)
	}
}
