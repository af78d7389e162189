// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"
)

// maxReport limits the bytes of a report that is read.
const maxReport = 2 << 20

// commitName matches the name of a directory with evidence.
var commitName = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// A Published is a report with the directory that it is in.
type Published struct {
	Commit string    `json:"commit"` // name of the directory
	Time   time.Time `json:"time"`   // when the gate published it
}

// List returns the newest reports in dir, the --out of gates, newest first and at most limit. It reads none of them.
func List(dir string, limit int) ([]Published, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := []Published{}
	for _, e := range entries {
		if !e.IsDir() || !commitName.MatchString(e.Name()) {
			continue
		}
		if st, err := os.Lstat(filepath.Join(dir, e.Name(), reportFile)); err == nil && st.Mode().IsRegular() {
			all = append(all, Published{e.Name(), st.ModTime().UTC()})
		}
	}
	slices.SortFunc(all, func(a, b Published) int { return b.Time.Compare(a.Time) })
	return all[:min(len(all), limit)], nil
}

// Read returns the report of a commit in dir. Without one the error is fs.ErrNotExist. It follows no links out of dir,
// and trusts nothing in the report.
func Read(dir, commit string) (*Report, Published, error) {
	p := Published{Commit: commit}
	if !commitName.MatchString(commit) {
		return nil, p, fmt.Errorf("%+.80q is not the hash of a commit: %w", commit, fs.ErrNotExist)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, p, err
	}
	defer root.Close()
	f, err := root.OpenFile(filepath.Join(commit, reportFile), os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not block
	if err != nil {
		return nil, p, err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, p, err
	case !st.Mode().IsRegular():
		return nil, p, errors.New("the report is not a regular file")
	}
	p.Time = st.ModTime().UTC()
	text, err := io.ReadAll(io.LimitReader(f, maxReport+1))
	if err != nil {
		return nil, p, err
	}
	if len(text) > maxReport {
		return nil, p, fmt.Errorf("the report is larger than %d bytes", maxReport)
	}
	r := &Report{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, p, fmt.Errorf("the report is damaged: %w", err)
	}
	if r.Format != reportFormat {
		return nil, p, fmt.Errorf("the report has the format %+.80q, not %q", r.Format, reportFormat)
	}
	return r, p, nil
}
