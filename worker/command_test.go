// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
)

// commandError checks that a command is refused, with a printable error that contains each of what.
func commandError(t *testing.T, c *repb.Command, what ...string) {
	t.Helper()
	c.Arguments = []string{"true"}
	_, _, err := checkCommand(c)
	if !errors.Is(err, cas.ErrInvalid) {
		t.Errorf("%v: got %v, want ErrInvalid", c, err)
		return
	}
	expect.Texts(t, err.Error(), what, "%v", c)
	for _, r := range err.Error() {
		if r < ' ' || r > '~' {
			t.Errorf("%v: %q is not printable ASCII", c, err)
			break
		}
	}
}

func TestRule082_UnknownOutputNodeProperties(t *testing.T) {
	for _, name := range []string{"owner", "", "MTime", "mtime ", "bazel_tool_input", "n\u00e9\n"} {
		commandError(t, &repb.Command{OutputNodeProperties: []string{"mtime", name}}, "output_node_properties", `"mtime" "unix_mode"`)
	}
	for _, names := range [][]string{{"mtime"}, {"unix_mode"}, {"unix_mode", "mtime"}, {"mtime", "mtime"}, nil} {
		if _, _, err := checkCommand(&repb.Command{Arguments: []string{"true"}, OutputNodeProperties: names}); err != nil {
			t.Errorf("%q: %v", names, err)
		}
	}
}

func TestRule077_OutputPaths(t *testing.T) {
	for _, p := range []string{"/", "/a", "a/", "a//", "..", "../a", "a/../..", "w/../../x", "a\x00b"} {
		commandError(t, &repb.Command{OutputPaths: []string{p}}, "output_paths")
		commandError(t, &repb.Command{OutputFiles: []string{p}}, "output_files")
		commandError(t, &repb.Command{OutputDirectories: []string{p}}, "output_directories")
	}
	commandError(t, &repb.Command{WorkingDirectory: "w", OutputPaths: []string{"../../b"}}, "output_paths")
	commandError(t, &repb.Command{OutputPaths: []string{"a", "b/../a"}}, "same path")
	for _, c := range []*repb.Command{
		{OutputPaths: []string{""}},
		{OutputDirectories: []string{""}},
		{WorkingDirectory: "w", OutputPaths: []string{"../x", "a"}},
		{WorkingDirectory: "w", OutputDirectories: []string{""}, OutputFiles: []string{"f"}},
		{OutputPaths: []string{"b", "a"}},
	} {
		c.Arguments = []string{"true"}
		if _, _, err := checkCommand(c); err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
}

func TestRule078_OldFieldsAreIgnoredBesideOutputPaths(t *testing.T) {
	c := &repb.Command{
		Arguments: []string{"true"}, OutputPaths: []string{"p"}, OutputFiles: []string{"/absolute", "p", "p/x"}, OutputDirectories: []string{"x/"},
	}
	outputs, dirs, err := checkCommand(c)
	expect.That(t, err == nil && len(outputs) == 1 && outputs[0] == "p" && len(dirs) == 0,
		"got %q, %q, %v; want only output_paths", outputs, dirs, err)
}

func TestRule079_OldFieldsMustNotOverlap(t *testing.T) {
	for _, c := range []*repb.Command{
		{OutputFiles: []string{"a"}, OutputDirectories: []string{"a"}},
		{OutputFiles: []string{"a", "a"}},
		{OutputFiles: []string{"a", "a/b"}},
		{OutputFiles: []string{"a", "a-b", "a/b/c"}},
		{OutputFiles: []string{"a"}, OutputDirectories: []string{"a/b"}},
		{OutputDirectories: []string{"a", "a"}},
		{OutputDirectories: []string{"a", "b/../a"}},
		{OutputFiles: []string{""}},
		{WorkingDirectory: "w", OutputFiles: []string{""}},
		{WorkingDirectory: "w/x", OutputFiles: []string{".."}},
		{WorkingDirectory: "w", OutputFiles: []string{".."}},
	} {
		commandError(t, c)
	}
	for _, c := range []*repb.Command{
		{OutputDirectories: []string{"a", "a/b"}}, // one may contain another
		{OutputDirectories: []string{"a"}, OutputFiles: []string{"a/f"}},
		{WorkingDirectory: "w", OutputFiles: []string{"../ww", "f"}},
	} {
		c.Arguments = []string{"true"}
		if _, _, err := checkCommand(c); err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
}
