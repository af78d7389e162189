// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// module is the path of this package's module.
const module = "github.com/cloister-build/cloister/tests/interop"

// cacheDir returns the directory that keeps the peers' modules and programs between runs.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "cloister-interop"), err
}

// goCommand returns a go command for the module in dir. It has its own module cache, because generate adds files to it.
func goCommand(ctx context.Context, cache, dir string, args ...string) *exec.Cmd {
	// The first build takes minutes.
	cmd := exec.CommandContext(ctx, "nice", append([]string{"-n", "10", "go"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOMODCACHE="+filepath.Join(cache, "mod"), "GOFLAGS=-modcacherw -buildvcs=false",
		"GOWORK=off", "CGO_ENABLED=0")
	return cmd
}

// run runs a command and returns its stdout; an error includes its stderr.
func run(cmd *exec.Cmd) (string, error) {
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("%w: %s", err, failed.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

// ModuleDir returns the directory of a module on which the module of the working directory depends.
func ModuleDir(ctx context.Context, module string) (string, error) {
	return run(exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module))
}

// BuildCloister compiles cloister and cloister-bench from this working copy into one directory, and returns the path of
// cloister. The working directory must be in this module.
func BuildCloister(ctx context.Context) (program string, err error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir, err := ModuleDir(ctx, "github.com/cloister-build/cloister")
	if err != nil {
		return "", err
	}
	program = filepath.Join(cache, "bin", "cloister")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", filepath.Dir(program)+"/", "./cmd/cloister", "./cmd/cloister-bench")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := run(cmd); err != nil {
		return "", fmt.Errorf("build cloister: %w", err)
	}
	return program, nil
}

// Build compiles the pinned version of the peer and returns the path of the program. The working directory must be in
// this module. Downloads are kept in the user's cache directory.
func (k Kind) Build(ctx context.Context) (program string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("build %s: %w", k.Name, err)
		}
	}()
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir, err := ModuleDir(ctx, module)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, "peers", k.dir)
	for _, f := range k.generated {
		if err := generate(ctx, cache, dir, f); err != nil {
			return "", err
		}
	}
	program = filepath.Join(cache, "bin", k.Name)
	_, err = run(goCommand(ctx, cache, dir, "build", "-trimpath", "-ldflags=-s -w", "-o", program, k.pkg))
	return program, err
}

// generate creates an empty file in the sources of a module, unless it exists.
func generate(ctx context.Context, cache, dir string, f file) error {
	if _, err := run(goCommand(ctx, cache, dir, "mod", "download", f.module)); err != nil {
		return err
	}
	sources, err := run(goCommand(ctx, cache, dir, "list", "-m", "-f", "{{.Dir}}", f.module))
	if err != nil {
		return err
	}
	name := filepath.Join(sources, f.name)
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(name, nil, 0o644)
}
