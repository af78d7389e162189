// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// A Client is a build tool of another project, which is published as a package for Python or Node.
type Client struct {
	Name    string
	pkg     string   // with its version
	python  string   // the only version of Python for which it is published, or ""
	sources []string // packages that it needs and that are published only as sources
	node    bool
	program string // in its directory
}

// The clients, each at the version that docs/clients.md names.
var (
	Pants       = Client{Name: "pants", pkg: "pantsbuild.pants==2.17.1", python: "3.9", program: "bin/pants"}
	BuildStream = Client{Name: "buildstream", pkg: "BuildStream==2.8.1", sources: []string{"pluginbase"}, program: "bin/bst"}
	Moon        = Client{Name: "moon", pkg: "@moonrepo/cli@2.5.5", node: true, program: "node_modules/.bin/moon"}
	OldBazel    = Client{
		Name: "bazel-2.1", pkg: "@bazel/bazel-linux_x64@2.1.0", node: true,
		program: "node_modules/@bazel/bazel-linux_x64/bazel-2.1.0-linux-x86_64",
	}
)

// Clients returns all clients.
func Clients() []Client { return []Client{Pants, BuildStream, Moon, OldBazel} }

// Install installs the client into the user's cache directory, unless an earlier call has, and returns the path of its
// program.
func (c Client) Install(ctx context.Context) (program string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("install %s: %w", c.pkg, err)
		}
	}()
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "clients", c.Name)
	program = filepath.Join(dir, c.program)
	installed := filepath.Join(dir, "installed")
	if b, err := os.ReadFile(installed); err == nil && string(b) == c.pkg {
		return program, nil
	}
	if err := os.RemoveAll(dir); err != nil { // another version, or one whose installation was interrupted
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	install := c.installPython
	if c.node {
		install = c.installNode
	}
	if err := install(ctx, dir); err != nil {
		return "", err
	}
	return program, os.WriteFile(installed, []byte(c.pkg), 0o644)
}

func (c Client) installNode(ctx context.Context, dir string) error {
	_, err := run(exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--silent", c.pkg))
	return err
}

func (c Client) installPython(ctx context.Context, dir string) error {
	python, err := c.interpreter(ctx)
	if err != nil {
		return err
	}
	if _, err := run(exec.CommandContext(ctx, python, "-m", "venv", dir)); err != nil {
		return err
	}
	args := []string{"install", "--quiet", "--only-binary=:all:"}
	for _, name := range c.sources {
		args = append(args, "--no-binary="+name)
	}
	_, err = run(exec.CommandContext(ctx, filepath.Join(dir, "bin", "pip"), append(args, c.pkg)...))
	return err
}

// interpreter returns the path of the client's version of Python: that on PATH, or one that pyenv has.
func (c Client) interpreter(ctx context.Context) (string, error) {
	if c.python == "" {
		return "python3", nil
	}
	name := "python" + c.python
	if run, err := exec.LookPath(name); err == nil && exec.CommandContext(ctx, run, "--version").Run() == nil {
		return run, nil
	}
	root, err := run(exec.CommandContext(ctx, "pyenv", "root"))
	if err != nil {
		return "", fmt.Errorf("no %s, and pyenv root: %w", name, err)
	}
	found, err := filepath.Glob(filepath.Join(root, "versions", c.python+".*", "bin", name))
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("no %s: %w", name, fs.ErrNotExist)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}
