// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
)

// Limits are those that Host enforces.
var Limits = []sandbox.Limit{sandbox.LimitOutputBytes, sandbox.LimitOutputFiles}

// exceeded returns the event for a limit of the outputs, the workspace or a temporary directory that the run exceeds
// now, or nil. It measures the files on disk. A run that has not ended can evade it: until the next call, with deleted
// files that it keeps open, and with files that it moves during the measurement. The measurement after its end misses
// what a surviving process moves meanwhile, and attributes of files that cannot be read. A tree that cannot be measured
// exceeds its limit, because a run could hide files in it.
func (r *Run) exceeded(ended bool) *sandbox.Event {
	for i, dir := range r.temps {
		bytes, _, err := size(dir, ended)
		if err != nil || bytes > r.spec.Temp[i].Bytes {
			e := event(sandbox.LimitOutputBytes, bytes, r.spec.Temp[i].Bytes, err)
			e.Subject = "room in " + r.spec.Temp[i].Target
			return e
		}
	}
	if r.ws == nil {
		return nil
	}
	byteLimit, fileLimit := limit.Lower(r.spec.Limits.OutputBytes, r.ws.bytes), limit.Lower(r.spec.Limits.OutputFiles, r.ws.files)
	if byteLimit == sandbox.Unlimited && fileLimit == sandbox.Unlimited {
		return nil
	}
	bytes, files := int64(0), -int64(len(r.placed))
	for _, p := range r.placed {
		bytes -= p.size
	}
	var err error
	for _, o := range r.spec.Outputs {
		b, f, sizeErr := size(filepath.Join(r.ws.dir, filepath.FromSlash(o.Source)), ended)
		bytes, files, err = bytes+b, files+f, errors.Join(err, sizeErr)
	}
	switch {
	case byteLimit != sandbox.Unlimited && (bytes > byteLimit || err != nil):
		return event(sandbox.LimitOutputBytes, bytes, byteLimit, err)
	case fileLimit != sandbox.Unlimited && (files > fileLimit || err != nil):
		return event(sandbox.LimitOutputFiles, files, fileLimit, err)
	}
	return nil
}

// event is limit.Event. Unless unmeasured is nil, actual is only a lower bound, and unmeasured says why.
func event(l sandbox.Limit, actual, most int64, unmeasured error) *sandbox.Event {
	e := limit.Event(l, actual, most)
	if unmeasured != nil {
		e.Actual = "at least " + e.Actual + ", not measurable: " + unmeasured.Error()
	}
	return e
}

// size returns the bytes and the number of entries below dir, as the file system has them. An entry that cannot be read
// is an error, and after the run also one that disappears meanwhile: a surviving process could hide files by renaming
// directories.
func size(dir string, ended bool) (bytes, files int64, err error) {
	dir = verbatim(dir)
	err = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err == nil {
			var n int64
			n, err = fileBytes(p)
			bytes += n
		}
		if err == nil && p != dir {
			files++
		}
		if errors.Is(err, fs.ErrNotExist) && (!ended || p == dir) {
			err = nil
		}
		return err
	})
	return bytes, files, err
}
