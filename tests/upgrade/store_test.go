// SPDX-License-Identifier: Apache-2.0

// Package upgrade_test opens stores that released versions have written, in testdata, and finds everything in them.
//
// A change of the layout keeps them readable, or raises the version and says what to do. Either way, record a store of
// the program as it was last released before the change, as root, and one of the new program:
//
//	go test ./tests/upgrade -run TestRecord -record NAME -program PATH/cloister
//
// TestLastRecordingIsCurrent fails until the last recording has what this program writes.
package upgrade_test

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// Contents are what a recorded store contains: want.json beside the store.
type Contents struct {
	Version     string // of the layout
	From, Until time.Time
	Blobs       []Blob
	Results     []Result
	Executed    string // an action in instance main, with an output, in the history if there is one
	Violation   string // an action in the audit log; "" without one
	Verdict     string // an action in instance main that is known not to be reproducible; "" without verdicts
	History     bool

	// All in instance main, and "" in stores without them:
	Unsent        string // a blob that an upstream has refused
	Pending       string // a blob that waits for an upstream
	PendingResult Result // a result that waits for an upstream
	Image         string // a container image
	Build         string // an invocation with events
	Drain         string // the reason why all workers are drained
}

// A Blob is a stored blob.
type Blob struct {
	Instance, Digest string
	Chunked          bool
}

// A Result is a stored action result.
type Result struct{ Instance, Action, Stdout string }

// Names in an archive.
const (
	contentsName = "want.json"
	storeName    = "store"
)

// pack writes the store in dir and its contents to an archive. It leaves out what belongs to a running process.
func pack(t *testing.T, archive, dir string, c *Contents) {
	t.Helper()
	text := must.Get(json.MarshalIndent(c, "", "  "))(t)
	must.Succeed(t, os.WriteFile(filepath.Join(dir, contentsName), append(text, '\n'), 0o600))
	f := must.Get(os.Create(archive))(t)
	zip := must.Get(gzip.NewWriterLevel(f, gzip.BestCompression))(t)
	w := tar.NewWriter(zip)
	must.Succeed(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil || name == "." || e.Name() == "lock" || e.Type()&fs.ModeSocket != 0 {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		h := &tar.Header{Name: filepath.ToSlash(name), Mode: int64(info.Mode().Perm()), Typeflag: tar.TypeDir}
		if e.IsDir() {
			return w.WriteHeader(h)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		h.Typeflag, h.Size = tar.TypeReg, int64(len(data))
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	}))
	must.Succeed(t, errors.Join(w.Close(), zip.Close(), f.Close()))
}

// unpack unpacks an archive into a new directory, and returns the store's directory and contents.
func unpack(t *testing.T, archive string) (store string, c *Contents) {
	t.Helper()
	dir := t.TempDir()
	f := must.Get(os.Open(archive))(t)
	defer f.Close()
	zip := must.Get(gzip.NewReader(f))(t)
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must.Succeed(t, err)
		path := filepath.Join(dir, filepath.FromSlash(h.Name))
		if h.Typeflag == tar.TypeDir {
			must.Succeed(t, os.MkdirAll(path, 0o700))
			continue
		}
		must.Succeed(t, os.WriteFile(path, must.Get(io.ReadAll(r))(t), fs.FileMode(h.Mode)))
	}
	text := must.Get(os.ReadFile(filepath.Join(dir, contentsName)))(t)
	c = &Contents{}
	must.Succeed(t, json.Unmarshal(text, c))
	return filepath.Join(dir, storeName), c
}
