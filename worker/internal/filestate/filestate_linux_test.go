// SPDX-License-Identifier: Apache-2.0

package filestate_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/internal/filestate"
)

// settled returns the state of a file once no further change can have the same time.
func settled(t *testing.T, file string) (s filestate.State) {
	t.Helper()
	must.Hold(t, "the state of a file that does not change equals itself", func() bool {
		s = filestate.Of(file)
		return s.Equal(s)
	})
	return s
}

// TestChangeWithSameInodeSizeAndTimeIsNoticed: an editor may write into the file and set its time back.
func TestChangeWithSameInodeSizeAndTimeIsNoticed(t *testing.T) {
	file, at := filepath.Join(t.TempDir(), "file"), time.Unix(1, 0)
	write := func(text string) {
		t.Helper()
		must.Succeed(t, errors.Join(os.WriteFile(file, []byte(text), 0o600), os.Chtimes(file, at, at)))
	}
	write("one")
	first := filestate.Of(file)
	write("two")
	expect.That(t, !filestate.Of(file).Equal(first), "the state is the same just after a change at once")
	before := settled(t, file)
	expect.That(t, filestate.Of(file).Equal(before), "the state differs without a change")
	write("six")
	expect.That(t, !settled(t, file).Equal(before),
		"the state is the same after a change of equal size and modification time")
	must.Succeed(t, os.Remove(file))
	if gone := filestate.Of(file); gone.Equal(before) || !gone.Equal(filestate.State{}) {
		t.Error("a missing file has a state")
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	file, pipe := filepath.Join(dir, "file"), filepath.Join(dir, "pipe")
	must.Succeed(t, errors.Join(os.WriteFile(file, []byte("text"), 0o640), syscall.Mkfifo(pipe, 0o600)))
	text, state, err := filestate.Read(file, 4)
	if err != nil || string(text) != "text" || state.Mode() != 0o640 {
		t.Errorf("got %q, %v, %v", text, state.Mode(), err)
	}
	for name, want := range map[string]string{file: "more than 3 bytes", pipe: "not a regular file", dir: "not a regular file", file + "?": "no such file"} {
		if _, _, err := filestate.Read(name, 3); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", name, err, want)
		}
	}
}
