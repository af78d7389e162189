// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

var updateReference = flag.Bool("update", false, "rewrite docs/reference and schemas")

// TestReferenceIsCurrent generates the command reference and the man pages and compares them with docs/reference.
func TestReferenceIsCurrent(t *testing.T) {
	const committed = "../../docs/reference"
	dir := t.TempDir()
	if *updateReference {
		dir = committed
		must.Succeed(t, os.RemoveAll(dir))
	}
	man := filepath.Join(dir, "man")
	must.Succeed(t, os.MkdirAll(man, 0o755))
	root := rootCommand()
	if completion, _, err := root.Find([]string{"completion"}); err == nil {
		root.RemoveCommand(completion) // documented by cobra itself
	}
	visitCommands(root, func(c *cobra.Command) {
		c.DisableAutoGenTag = true
		if jobs := c.Flags().Lookup("jobs"); jobs != nil && jobs.DefValue == strconv.Itoa(runtime.GOMAXPROCS(0)) {
			jobs.DefValue = "number of processors"
		}
	})
	must.Succeed(t, doc.GenMarkdownTree(root, dir))
	undated := time.Unix(0, 0)
	header := &doc.GenManHeader{Section: "1", Source: "Cloister", Manual: "Cloister", Date: &undated}
	must.Succeed(t, doc.GenManTree(root, header, man))
	expect.Equal(t, cmp.Diff(readTree(t, committed), readTree(t, dir)), "",
		"docs/reference is not current; run make reference (- committed, + generated)")
}

// readTree returns the files below dir by path.
func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, pattern := range []string{"*.md", "man/*.1"} {
		paths := must.Get(filepath.Glob(filepath.Join(dir, pattern)))(t)
		for _, path := range paths {
			files[must.Get(filepath.Rel(dir, path))(t)] = string(must.Get(os.ReadFile(path))(t))
		}
	}
	return files
}
