// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/queue"
)

// drainsPath returns the file with the drained workers.
func drainsPath(dir string) string { return filepath.Join(dir, "drains.json") }

// drainsVersion is the version of the file format. Others are rejected, because a lost drain is dangerous.
const drainsVersion = 1

// drainsFile is the content of the file.
type drainsFile struct {
	Version int `json:"version"`
	queue.DrainState
}

// readDrains returns the drains that an earlier server kept. An unreadable file is an error: losing a drain would give
// actions to a machine under maintenance.
func readDrains(dir string) (queue.DrainState, error) {
	name := drainsPath(dir)
	data, err := durable.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return queue.DrainState{}, nil
	}
	var f drainsFile
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err == nil && f.Version != drainsVersion {
		err = fmt.Errorf("version %d, want %d", f.Version, drainsVersion)
	}
	if err != nil {
		return queue.DrainState{}, exit.New(exit.Environment, fmt.Errorf("read drained workers from %s: %w; remove the file, and drain the workers again", name, err))
	}
	return f.DrainState, nil
}

// keepDrains stores s for the next server. Calls must not overlap.
func keepDrains(dir string, s queue.DrainState) error {
	data, err := json.Marshal(drainsFile{drainsVersion, s})
	if err != nil {
		return err
	}
	return durable.WriteFile(drainsPath(dir), append(data, '\n'), 0o600)
}

// AllDrained returns since when and why no worker takes actions, "" if one does or if none is connected: waiting
// actions make an autoscaler start one.
func AllDrained(work *queue.Queue) string {
	since, why := work.Drained()
	if since.IsZero() {
		return ""
	}
	text := "every worker is drained since " + since.UTC().Format(time.RFC3339)
	if why != "" {
		text += ": " + why
	}
	return printable.Text(text) + "; end it with cloister undrain --all"
}
