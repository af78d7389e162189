// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"math"
	"os"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// A log is the stdout or stderr of a command: a file that the client reads. Each may be as large as all outputs
// together, so that a command cannot fill the disk.
type log struct {
	file      *os.File
	left      int64
	truncated bool
}

// newLog creates the file. It must not exist yet.
func (r *Runner) newLog(c *command, field, p string) (*log, error) {
	f, err := c.build.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, pathError(field, err)
	}
	l := &log{file: f, left: r.grant.Limits.OutputBytes}
	if l.left == sandbox.Unlimited {
		l.left = math.MaxInt64
	}
	return l, nil
}

// Write writes up to the limit, then one notice, and discards the rest, so that it never blocks a command.
func (l *log) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), l.left)]
	if _, err := l.file.Write(keep); err != nil {
		return 0, err
	}
	l.left -= int64(len(keep))
	if len(keep) < len(p) && !l.truncated {
		l.truncated = true
		if _, err := l.file.WriteString(worker.TruncationNotice); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// maxHints is the number of our lines at the end of a failed command's stderr.
const maxHints = 5

// addHints appends lines that help to understand why the command failed.
func (l *log) addHints(lines []string) error {
	for _, line := range lines[:min(len(lines), maxHints)] {
		if _, err := l.file.WriteString("cloister: " + line + "\n"); err != nil {
			return err
		}
	}
	return nil
}

// close closes the file, and sets err if that fails and *err is nil: network file systems report failed writes then.
func (l *log) close(err *error) {
	if closing := l.file.Close(); *err == nil {
		*err = closing
	}
}
