// SPDX-License-Identifier: Apache-2.0

// Package bazelrun runs the example with a real cloister serve and a real Bazel, as child processes with private
// directories. Its callers, tests/bazel and tests/demo, check the results.
package bazelrun

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Build is the result of one call of Bazel.
type Build struct {
	// ExitCode is Bazel's: 0 success, 1 the build failed, 3 a test did not pass.
	ExitCode int
	// Output is everything that it printed.
	Output string
	Wall   time.Duration
}

// summary matches Bazel's count of actions by kind: "INFO: 7 processes: 3 internal, 4 remote."
var summary = regexp.MustCompile(`INFO: \d+ process(?:es)?: (.*)\.`)

// Processes returns the number of actions by kind in the words of Bazel's summary: "internal", "remote", "remote cache
// hit", "local". It is empty without a summary.
func (b *Build) Processes() map[string]int {
	counts := map[string]int{}
	match := summary.FindStringSubmatch(b.Output)
	if match == nil {
		return counts
	}
	for part := range strings.SplitSeq(match[1], ", ") {
		number, kind, _ := strings.Cut(part, " ")
		if n, err := strconv.Atoi(number); err == nil {
			counts[kind] = n
		}
	}
	return counts
}

// workspace lists the parts of the repository that Bazel reads to build the example.
var workspace = []string{
	".bazelignore", ".bazelrc", "MODULE.bazel", "WORKSPACE", "examples", "tests/bazel/stubs",
}

// CopyWorkspace copies the example, what Bazel needs to build it, and more files and directories from the repository at
// root to dir. The copy is world-readable.
func CopyWorkspace(dir, root string, more ...string) error {
	for _, name := range slices.Concat(workspace, more) {
		from, to := filepath.Join(root, name), filepath.Join(dir, name)
		err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			target := to + strings.TrimPrefix(path, from)
			if e.IsDir() {
				return os.MkdirAll(target, 0o755)
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(target, b, info.Mode().Perm()|0o444)
		})
		if err != nil {
			return fmt.Errorf("copy workspace: %w", err)
		}
	}
	return nil
}
