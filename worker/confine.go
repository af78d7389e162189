// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
)

// ExecRoot is where every action finds its input root, on every worker.
const ExecRoot = "/build"

// Defaults are the variables that an action has if its command does not set them.
var defaults = map[string]string{
	"HOME":   "/tmp",
	"PATH":   "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"TMPDIR": "/tmp",
}

// confine says what the action may see and use, before anything is laid out for it.
func (l *Local) confine(req *Request) (*sandbox.Spec, error) {
	spec := &sandbox.Spec{
		Args:    req.Command.Arguments,
		Dir:     path.Join(ExecRoot, req.Command.WorkingDirectory),
		Env:     environment(req.Command),
		Inputs:  slices.Clone(l.Toolchain),
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: l.TempBytes}},
		Network: sandbox.Network{Loopback: true, Listen: true},
		Limits:  sandbox.DefaultLimits(),
		Timeout: req.Timeout,
		Grace:   l.Grace,
	}
	return spec, nil
}

// environment returns the command's variables and the defaults beneath them, sorted.
func environment(c *repb.Command) []string {
	vars := make(map[string]string, len(defaults)+len(c.EnvironmentVariables))
	for k, v := range defaults {
		vars[k] = v
	}
	for _, v := range c.EnvironmentVariables {
		vars[v.Name] = v.Value
	}
	env := make([]string, 0, len(vars))
	for k, v := range vars {
		env = append(env, k+"="+v)
	}
	slices.SortFunc(env, func(a, b string) int {
		ka, _, _ := strings.Cut(a, "=")
		kb, _, _ := strings.Cut(b, "=")
		return strings.Compare(ka, kb)
	})
	return env
}

// toolchainPaths are the parts of a host that compilers, interpreters and shells are made of. What an
// administrator, a user or a service keeps is not among them.
var toolchainPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
	"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
	"/etc/java-*", "/etc/python3*", "/etc/perl",
	"/etc/mime.types", "/etc/protocols", "/etc/services",
}

// HostToolchain returns the parts of this host that every action may read: directories of programs and
// libraries, and the few files of /etc that these need. What does not exist is left out.
func HostToolchain() ([]sandbox.Input, error) {
	var inputs []sandbox.Input
	for _, pattern := range toolchainPaths {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, target := range matches {
			source, err := filepath.EvalSymlinks(target)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			inputs = append(inputs, sandbox.Input{Target: target, Content: "host", Source: source})
		}
	}
	return inputs, nil
}
