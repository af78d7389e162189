// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/queue"
)

// TestDrainsSurviveRestart: they are read as they were kept, and an unreadable file is an error.
func TestDrainsSurviveRestart(t *testing.T) {
	dir := t.TempDir()
	if s, err := readDrains(dir); err != nil || !reflect.DeepEqual(s, queue.DrainState{}) {
		t.Errorf("without a file: %+v, %v", s, err)
	}
	at := time.Date(2026, 11, 22, 4, 5, 6, 7, time.UTC)
	for _, want := range []queue.DrainState{
		{Workers: map[string]queue.Drain{"a b\u00e9": {Since: at, Why: "a \"kernel\""}}},
		{Joining: &queue.Drain{Since: at}, Admitted: []string{"c"}},
		{},
	} {
		must.Succeed(t, keepDrains(dir, want))
		if got, err := readDrains(dir); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	for _, text := range []string{"", "{", `{"version":2}`, "{}", `{"version":1,"workers":[]}`} {
		must.Succeed(t, os.WriteFile(drainsPath(dir), []byte(text), 0o600))
		var e *exit.Error
		if _, err := readDrains(dir); !errors.As(err, &e) || e.Code != exit.Environment || !strings.Contains(err.Error(), "drains.json") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
