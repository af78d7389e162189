// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// An eventLog is the log of a sandbox: a line for its creation, each command and its end.
type eventLog struct {
	mu   sync.Mutex
	file *os.File
	left int
}

// Limits of a log: a sandbox may execute any number of commands.
const (
	maxLog     = 16 << 20 // bytes
	maxCommand = 500      // bytes of a command line
)

func openLog(path string) (*eventLog, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	return &eventLog{file: f, left: maxLog}, nil
}

// add adds a line. The log explains what happened; the sandbox works without it.
func (l *eventLog) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := time.Now().UTC().Format(time.RFC3339) + "  " + printable.Text(text) + "\n"
	if l.left -= len(line); l.left >= 0 {
		_, _ = l.file.WriteString(line)
	}
}

// command adds the end of a command.
func (l *eventLog) command(args []string, code int, took time.Duration, err error) {
	text := render.QuoteScript(args)
	if len(text) > maxCommand {
		text = strings.ToValidUTF8(text[:maxCommand], "") + "..."
	}
	how := fmt.Sprintf("exit code %d", code)
	if err != nil {
		how = err.Error()
	}
	l.add(fmt.Sprintf("exec %s: %s after %v", text, how, took.Round(time.Millisecond)))
}

func (l *eventLog) close() { l.file.Close() }

// A LogLine is a line of a sandbox's log. It is JSON for programs.
type LogLine struct {
	Time time.Time `json:"time"`
	Text string    `json:"text"`
}

// Logs returns the log of a sandbox.
func Logs(name string) ([]LogLine, error) {
	dir, _, err := find(name)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, logFile))
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	lines := []LogLine{}
	for line := range strings.Lines(string(text)) {
		at, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		when, _ := time.Parse(time.RFC3339, at) // add wrote it
		lines = append(lines, LogLine{when, rest})
	}
	return lines, nil
}
