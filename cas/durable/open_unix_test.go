// SPDX-License-Identifier: Apache-2.0

//go:build unix

package durable

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// TestOnlyRegularFilesAreOpened: opening a pipe would wait for its other end.
func TestOnlyRegularFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	must.Succeed(t, syscall.Mkfifo(pipe, 0o600))
	for _, path := range []string{pipe, dir, os.DevNull} {
		if _, err := ReadFile(path); !errors.Is(err, ErrNotRegular) {
			t.Errorf("ReadFile(%s): got %v, want ErrNotRegular", path, err)
		}
		for _, replay := range []func([]byte) error{nil, func([]byte) error { return nil }} {
			if _, err := Open(Config{Path: path, Replay: replay}); !errors.Is(err, ErrNotRegular) {
				t.Errorf("Open(%s): got %v, want ErrNotRegular", path, err)
			}
		}
	}
	path := filepath.Join(dir, "file")
	must.Succeed(t, os.WriteFile(path, []byte("text"), 0o600))
	if b, err := ReadFile(path); err != nil || string(b) != "text" {
		t.Errorf("ReadFile: got %q, %v", b, err)
	}
}
