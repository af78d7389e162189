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

// drainsOf returns the file in which a server remembers which workers are drained.
func drainsOf(dir string) string { return filepath.Join(dir, "drains.json") }

// drainsVersion is that of the file's format. Another one is refused: what it says might be lost.
const drainsVersion = 1

// drainsFile is what the file says.
type drainsFile struct {
	Version int `json:"version"`
	queue.DrainState
}

// readDrains returns what an earlier server kept in dir. A file that cannot be understood is an error: to forget a drain
// gives actions to a machine that somebody works on.
func readDrains(dir string) (queue.DrainState, error) {
	name := drainsOf(dir)
	data, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return queue.DrainState{}, nil
	}
	var f drainsFile
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err == nil && f.Version != drainsVersion {
		err = fmt.Errorf("its version is %d, and %d is known", f.Version, drainsVersion)
	}
	if err != nil {
		return queue.DrainState{}, exit.New(exit.Environment, fmt.Errorf("which workers are drained cannot be read from %s: %w; remove it, and drain again whom you want drained", name, err))
	}
	return f.DrainState, nil
}

// keepDrains keeps s in dir for the next server. Calls come one after the other.
func keepDrains(dir string, s queue.DrainState) error {
	data, err := json.Marshal(drainsFile{drainsVersion, s})
	if err != nil {
		return err
	}
	return durable.WriteFile(drainsOf(dir), append(data, '\n'), 0o600)
}

// AllDrained says since when and why no worker is given actions, "" if one is, or would be if it joined: actions that wait
// are why an autoscaler starts some.
func AllDrained(work *queue.Queue) string {
	since, why := work.Drained()
	if since.IsZero() {
		return ""
	}
	text := "every worker is drained since " + since.UTC().Format(time.RFC3339)
	if why != "" {
		text += ": " + why
	}
	return printable.Text(text) + "; cloister undrain gives them actions again"
}
