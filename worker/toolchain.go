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

// toolchain returns the fingerprint of this host's programs that a run executed. Programs that only watchdogs execute
// are accidental. If nothing watched the run, only the command's own program is known.
func (l *Local) toolchain(
	spec *sandbox.Spec, r *sandbox.Result,
) (t manifest.Toolchain, accidental []manifest.Program) {
	t = manifest.Toolchain{Host: l.cfg.Host, Complete: r.ExecutedAll}
	executed := r.Executed
	if spec.Audit == sandbox.AuditOff {
		executed = l.commandProgram(spec)
	}
	if ownRoot(spec) {
		return t, nil // the manifest names it as a whole
	}
	for _, p := range executed {
		source, ok := l.onHost(p)
		if !ok {
			continue // it is in the input root, which the manifest names
		}
		program := manifest.Program{Path: p, Sum: l.sums.of(source)}
		if isWatchdogProgram(p) && !slices.Contains(l.commandProgram(spec), p) {
			accidental = append(accidental, program)
		} else {
			t.Programs = append(t.Programs, program)
		}
	}
	return t, accidental
}

// ownRoot reports whether a run has its own root file system, so that it can execute no program of this host.
func ownRoot(spec *sandbox.Spec) bool {
	return spec.Root != nil || slices.ContainsFunc(spec.Outputs, func(o sandbox.Output) bool { return o.Target == "/" })
}

// isWatchdogProgram reports whether p is a system program that only waits or lists processes. A watchdog beside a
// command, such as that of Bazel's test-setup.sh, may or may not execute them, depending on the scheduler, and no
// output depends on it.
func isWatchdogProgram(p string) bool {
	switch dir, name := path.Split(p); dir {
	case "/bin/", "/usr/bin/":
		return name == "ps" || name == "pgrep" || name == "sleep"
	}
	return false
}

// onHost returns the path on this host of the toolchain path p, or false if p is not part of the toolchain.
func (l *Local) onHost(p string) (source string, ok bool) {
	longest := -1
	for _, in := range l.cfg.Toolchain {
		rest, below := strings.CutPrefix(p, in.Target)
		if below && (rest == "" || rest[0] == '/') && len(in.Target) > longest {
			source, longest = in.Source+filepath.FromSlash(rest), len(in.Target)
		}
	}
	return source, longest >= 0
}

// commandProgram returns the path, without symlinks, of the program that the command names, or nothing if it is not
// part of the toolchain.
func (l *Local) commandProgram(spec *sandbox.Spec) []string {
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
		resolved, err := filepath.EvalSymlinks(source)
		if err != nil {
			continue
		}
		for _, in := range l.cfg.Toolchain {
			rest, below := strings.CutPrefix(resolved, in.Source)
			if below && (rest == "" || os.IsPathSeparator(rest[0])) {
				return []string{in.Target + filepath.ToSlash(rest)}
			}
		}
	}
	return nil
}

// sums caches the SHA-256 sums of files on this host while they do not change. Make it with newSums.
type sums struct {
	mu    sync.Mutex
	known map[identity]string // guarded by mu
}

// maxSums bounds the cache.
const maxSums = 10_000

func newSums() *sums { return &sums{known: map[identity]string{}} }

// of returns the SHA-256 sum of a regular file in hexadecimal, or manifest.Unreadable.
func (s *sums) of(name string) string {
	info, err := os.Lstat(name)
	if err != nil || !info.Mode().IsRegular() {
		return manifest.Unreadable
	}
	id, identified := identityOf(info)
	if identified {
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
	if identified {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.known) == maxSums {
			clear(s.known)
		}
		s.known[id] = sum
	}
	return sum
}

var errChanged = errors.New("the file changed while it was read")

// sumFile returns the sum of the file that info describes.
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
	after, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !os.SameFile(info, after) || info.Size() != after.Size() || !info.ModTime().Equal(after.ModTime()) {
		return "", errChanged
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
