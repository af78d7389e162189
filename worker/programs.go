// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// toolchain returns the fingerprint of what a run used of this host, and the programs that it executed there by accident.
// Where nobody watched the run, the one program that is known is the command's own.
func (l *Local) toolchain(spec *sandbox.Spec, r *sandbox.Result) (t manifest.Toolchain, accidental []manifest.Program) {
	t = manifest.Toolchain{Host: l.Host, Complete: r.ExecutedAll}
	executed := r.Executed
	if spec.Audit == sandbox.AuditOff {
		executed = l.ownProgram(spec)
	}
	for _, p := range executed {
		// What is not the host's is in the input root, and so known.
		source, ok := l.onHost(p)
		if !ok {
			continue
		}
		program := manifest.Program{Path: p, Sum: l.sums.of(source)}
		if isWatchdogs(p) && !slices.Contains(l.ownProgram(spec), p) {
			accidental = append(accidental, program)
		} else {
			t.Programs = append(t.Programs, program)
		}
	}
	return t, accidental
}

// isWatchdogs reports whether a path without links is of a program of the system that only waits, or looks at processes.
// Who starts a watchdog beside a command, as Bazel's test-setup.sh does beside each test, executes these or does not, as
// the scheduler likes, and nothing that is made depends on it.
func isWatchdogs(p string) bool {
	switch dir, name := path.Split(p); dir {
	case "/bin/", "/usr/bin/":
		return name == "ps" || name == "pgrep" || name == "sleep"
	}
	return false
}

// onHost returns where on this host a path of the toolchain lies, or false if it is none.
func (l *Local) onHost(p string) (source string, ok bool) {
	longest := -1
	for _, in := range l.Toolchain {
		if rest, below := strings.CutPrefix(p, in.Target); below && (rest == "" || rest[0] == '/') && len(in.Target) > longest {
			source, longest = in.Source+filepath.FromSlash(rest), len(in.Target)
		}
	}
	return source, longest >= 0
}

// ownProgram returns the path, without links, of the program that a command names, as a list of one, or none if it is
// not the host's.
func (l *Local) ownProgram(spec *sandbox.Spec) []string {
	candidates := []string{spec.Args[0]}
	if !strings.Contains(spec.Args[0], "/") {
		candidates = nil
		for _, kv := range spec.Env {
			if dirs, ok := strings.CutPrefix(kv, "PATH="); ok {
				for dir := range strings.SplitSeq(dirs, ":") {
					candidates = append(candidates, path.Join(dir, spec.Args[0]))
				}
			}
		}
	}
	for _, p := range candidates {
		source, ok := l.onHost(p)
		if !ok {
			continue
		}
		real, err := filepath.EvalSymlinks(source)
		if err != nil {
			continue
		}
		for _, in := range l.Toolchain {
			if rest, below := strings.CutPrefix(real, in.Source); below && (rest == "" || os.IsPathSeparator(rest[0])) {
				return []string{in.Target + filepath.ToSlash(rest)}
			}
		}
	}
	return nil
}

// sums are the SHA-256 of files of the host, each read once while it does not change. Make it with newSums.
type sums struct {
	mu    sync.Mutex
	known map[identity]string // guarded by mu
}

// maxSums bounds how many are known.
const maxSums = 10_000

func newSums() *sums { return &sums{known: map[identity]string{}} }

// of returns the SHA-256 of a regular file in hexadecimal, or manifest.Unreadable.
func (s *sums) of(name string) string {
	info, err := os.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return manifest.Unreadable
	}
	id, kept := identityOf(info)
	if kept {
		s.mu.Lock()
		sum := s.known[id]
		s.mu.Unlock()
		if sum != "" {
			return sum
		}
	}
	sum, err := sumFile(name, info)
	if err != nil {
		return manifest.Unreadable
	}
	if kept {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.known) == maxSums {
			clear(s.known)
		}
		s.known[id] = sum
	}
	return sum
}

var errChanged = errors.New("the file is another one now")

// sumFile reads the file that info is about.
func sumFile(name string, info fs.FileInfo) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	// Looked at afterwards, so that what was written meanwhile shows.
	after, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !os.SameFile(info, after) || info.Size() != after.Size() || !info.ModTime().Equal(after.ModTime()) {
		return "", errChanged
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
