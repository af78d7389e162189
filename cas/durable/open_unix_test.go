// SPDX-License-Identifier: Apache-2.0

//go:build unix

package durable

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestOnlyRegularFilesAreOpened: opening a pipe would wait for its other end.
func TestOnlyRegularFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	must.Succeed(t, syscall.Mkfifo(pipe, 0o600))
	for _, path := range []string{pipe, dir, os.DevNull} {
		expect.Error(t, expect.Err(ReadFile(path)), ErrNotRegular, "ReadFile(%s)", path)
		for _, replay := range []func([]byte) error{nil, func([]byte) error { return nil }} {
			expect.Error(t, expect.Err(Open(Config{Path: path, Replay: replay})), ErrNotRegular, "Open(%s)", path)
		}
	}
	path := filepath.Join(dir, "file")
	must.Succeed(t, os.WriteFile(path, []byte("text"), 0o600))
	expect.Equal(t, string(must.Get(ReadFile(path))(t)), "text", "ReadFile")
}
