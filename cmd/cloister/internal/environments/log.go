// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// An eventLog is the log of a sandbox: a line for its creation, each command and its end.
type eventLog struct {
	mu   sync.Mutex
	file *os.File
	size int64
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
	return &eventLog{file: f}, nil
}

// add adds a line. The log explains what happened; the sandbox works without it. If a write fails or the log is full,
// add renames it to log.partial, since a full disk has no space for a note.
func (l *eventLog) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := time.Now().UTC().Format(time.RFC3339) + "  " + printable.Text(text) + "\n"
	if l.size+int64(len(line)) <= maxLog {
		if _, err := l.file.WriteString(line); err == nil {
			l.size += int64(len(line))
			return
		}
		_ = l.file.Truncate(l.size) // removes a partly written line
	}
	_ = os.Rename(l.file.Name(), filepath.Join(filepath.Dir(l.file.Name()), partialLog)) // it may have that name already
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
	path := filepath.Join(dir, logFile)
	text, err := os.ReadFile(path)
	partial := errors.Is(err, fs.ErrNotExist)
	if partial {
		path = filepath.Join(dir, partialLog)
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, exit.New(exit.Environment, err)
	}
	lines := []LogLine{}
	for line := range strings.Lines(string(text)) {
		at, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		when, _ := time.Parse(time.RFC3339, at) // add wrote it
		lines = append(lines, LogLine{when, rest})
	}
	if partial {
		lines = append(lines, LogLine{
			time.Now().UTC().Truncate(time.Second),
			fmt.Sprintf("%s is incomplete: a write failed, or it reached its limit of %s", path, sandbox.Bytes(maxLog)),
		})
	}
	return lines, nil
}
