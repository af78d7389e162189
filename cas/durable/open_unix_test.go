// SPDX-License-Identifier: Apache-2.0

//go:build unix

package durable

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
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
	// A killed process leaves a regular file under this name, and nobody reads what is written to a pipe.
	path := filepath.Join(dir, "file")
	must.Succeed(t, syscall.Mkfifo(path+newSuffix, 0o600))
	write := func(*os.File) error { return nil }
	expect.Error(t, Replace(path, write), ErrNotRegular, "Replace")
	l := must.Get(Open(Config{Path: path}))(t)
	expect.Error(t, l.Rewrite(slices.Values([][]byte{[]byte("record")})), ErrNotRegular, "Rewrite")
	var mu sync.Mutex
	mu.Lock()
	expect.Error(t, l.Compact(&mu, slices.Values([][]byte{[]byte("record")})), ErrNotRegular, "Compact")
	must.Succeed(t, l.Close())
	must.Succeed(t, os.WriteFile(path, []byte("text"), 0o600))
	expect.Equal(t, string(must.Get(ReadFile(path))(t)), "text", "ReadFile")
}
