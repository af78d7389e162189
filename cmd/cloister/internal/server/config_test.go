// SPDX-License-Identifier: Apache-2.0

package server

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// TestUnreadableHistorySaysWhatToDo checks that serve names the file and the flag that disables the history.
func TestUnreadableHistorySaysWhatToDo(t *testing.T) {
	var c Config
	c.Dir, c.History = t.TempDir(), 1<<20
	file := filepath.Join(c.Dir, "history", "00000000000000000001.v1.jsonl")
	must.Succeed(t, os.MkdirAll(file, 0o700))
	_, err := c.openHistory(nil)
	if err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "--history-size 0") {
		t.Errorf("got %v, want the file and advice", err)
	}
	c.History = 0
	if l, err := c.openHistory(nil); l != nil || err != nil {
		t.Errorf("--history-size 0: got %v, %v, want no history", l, err)
	}
}
