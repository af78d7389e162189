// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// timeout returns the timeout that an action sets, or 0.
func timeout(a *repb.Action) (time.Duration, error) {
	if a.Timeout == nil {
		return 0, nil
	}
	if err := a.Timeout.CheckValid(); err != nil {
		return 0, invalidf("timeout: %v", err)
	}
	d := a.Timeout.AsDuration()
	if d < 0 {
		return 0, invalidf("timeout %v is negative", d)
	}
	return d, nil
}

// checkCommand returns the paths of a command's outputs relative to the input root, clean, sorted and without
// duplicates, and those that API 2.0 declares as directories. It returns cas.ErrInvalid for a command that cannot run
// as specified (rules 71, 76 to 82).
func checkCommand(c *repb.Command) (outputs, dirs []string, err error) {
	if err := checkArguments(c); err != nil {
		return nil, nil, err
	}
	for _, p := range c.OutputNodeProperties {
		if known := tree.NodeProperties(); !slices.Contains(known, p) {
			return nil, nil, invalidf("output_node_properties %+.100q: this server supports only %q", p, known)
		}
	}
	d := c.WorkingDirectory
	if d != "" && (path.IsAbs(d) || path.Clean(d) != d || leavesRoot(d) || strings.ContainsRune(d, 0)) {
		return nil, nil, invalidf("working_directory %+.256q is not a clean path inside the input root", d)
	}
	if outputs, dirs, err = outputPaths(c); err != nil || len(c.OutputPaths) > 0 {
		return outputs, nil, err
	}
	return outputs, dirs, checkOutputFiles(c, outputs)
}

// checkArguments checks the arguments and the environment.
func checkArguments(c *repb.Command) error {
	if len(c.Arguments) == 0 || c.Arguments[0] == "" {
		return invalidf("arguments are empty")
	}
	for _, a := range c.Arguments {
		if strings.ContainsRune(a, 0) {
			return invalidf("argument %+.256q contains a NUL byte", a)
		}
	}
	names := map[string]bool{}
	for _, v := range c.EnvironmentVariables {
		if v.Name == "" || strings.ContainsAny(v.Name, "=\x00") || strings.ContainsRune(v.Value, 0) {
			return invalidf("environment variable %+.256q is malformed", v.Name)
		}
		if names[v.Name] {
			return invalidf("environment variable %s is set twice", v.Name)
		}
		names[v.Name] = true
	}
	return nil
}

// outputPaths returns the outputs of a command relative to the input root, sorted, and those from output_directories.
func outputPaths(c *repb.Command) (outputs, dirs []string, err error) {
	type list struct {
		field string
		paths []string
	}
	lists := []list{{"output_paths", c.OutputPaths}}
	if len(c.OutputPaths) == 0 {
		lists = []list{{"output_files", c.OutputFiles}, {"output_directories", c.OutputDirectories}}
	}
	seen := map[string]string{}
	for _, l := range lists {
		for _, p := range l.paths {
			clean, err := outputPath(c.WorkingDirectory, p, l.field)
			if err != nil {
				return nil, nil, err
			}
			if other, ok := seen[clean]; ok {
				return nil, nil, invalidf("%s %+.256q names the same path as %+.256q", l.field, p, other)
			}
			seen[clean] = p
			outputs = append(outputs, clean)
			if l.field == "output_directories" {
				dirs = append(dirs, clean)
			}
		}
	}
	slices.Sort(outputs)
	return outputs, dirs, nil
}

// checkOutputFiles checks the output_files of API 2.0: none may be a parent of another output (rule 79), or the working
// directory or a parent of it.
func checkOutputFiles(c *repb.Command, outputs []string) error {
	for _, p := range c.OutputFiles {
		clean := path.Join(c.WorkingDirectory, p)
		below := clean + "/"
		if clean == "" || clean == "." || strings.HasPrefix(c.WorkingDirectory+"/", below) {
			return invalidf("output_files %+.256q is the working directory or a parent of it, and cannot be a file", p)
		}
		// Everything below the path sorts at or after the path with its slash.
		i, _ := slices.BinarySearch(outputs, below)
		if i < len(outputs) && strings.HasPrefix(outputs[i], below) {
			return invalidf("output_files %+.256q is a parent of the output %+.256q", p, outputs[i])
		}
	}
	return nil
}

// outputPath converts p, relative to dir, to a path relative to the input root.
func outputPath(dir, p, field string) (string, error) {
	if path.IsAbs(p) || strings.HasSuffix(p, "/") || strings.ContainsRune(p, 0) {
		return "", invalidf("%s %+.256q: write a relative path without a trailing slash", field, p)
	}
	clean := path.Join(dir, p)
	if clean == "" {
		clean = "."
	}
	if leavesRoot(clean) {
		return "", invalidf("%s %+.256q is outside the input root", field, p)
	}
	return clean, nil
}

// leavesRoot reports whether a clean relative path leads out of its root.
func leavesRoot(clean string) bool { return clean == ".." || strings.HasPrefix(clean, "../") }

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", cas.ErrInvalid, fmt.Sprintf(format, args...))
}
