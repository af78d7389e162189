// SPDX-License-Identifier: Apache-2.0

package tests

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestBazelKnowsEveryModule checks that WORKSPACE and MODULE.bazel name each repository in the build files of packages.
func TestBazelKnowsEveryModule(t *testing.T) {
	used := map[string]bool{}
	label := regexp.MustCompile(`"@(\w+_\w+_\w+)//`)
	sources(t, func(_, text string) {
		for _, m := range label.FindAllStringSubmatch(text, -1) {
			used[m[1]] = true
		}
	}, ".bazel")
	want := slices.Sorted(maps.Keys(used))
	listed := regexp.MustCompile(`(?m)^    "(\w+_\w+_\w+)",$`)
	for _, name := range []string{"WORKSPACE", "MODULE.bazel"} {
		var got []string
		for _, m := range listed.FindAllSubmatch(must.Get(os.ReadFile(filepath.Join(root, name)))(t), -1) {
			got = append(got, string(m[1]))
		}
		expect.Slices(t, got, want, name)
	}
}

// TestWorkspaceLoadsNothingOfModules: Bazel 7 reads both files, and a repository of MODULE.bazel hides the stub of its
// name.
func TestWorkspaceLoadsNothingOfModules(t *testing.T) {
	read := func(name string) string { return string(must.Get(os.ReadFile(filepath.Join(root, name)))(t)) }
	module := read("MODULE.bazel")
	loads := regexp.MustCompile(`(?m)^load\("@(\w+)//`).FindAllStringSubmatch(read("WORKSPACE"), -1)
	expect.That(t, len(loads) > 0, "WORKSPACE loads nothing")
	for _, m := range loads {
		hidden := strings.Contains(module, `bazel_dep(name = "`+m[1]+`"`)
		expect.That(t, !hidden, "WORKSPACE loads from @%s, which MODULE.bazel has, too", m[1])
	}
}
