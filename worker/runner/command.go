// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A command is a checked request. Its paths are clean and relative to the build directory.
type command struct {
	build                 *os.Root // the build directory
	args, env             []string
	workingDirectory      string // relative to the input root
	inputRoot             string
	stdout, stderr        string
	serverLogs, temporary string // "" if the request names none
}

// parse checks everything in a request that needs no disk access. It fails with INVALID_ARGUMENT and names the field.
func parse(req *runnerpb.RunRequest) (*command, error) {
	bad := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	if len(req.Arguments) == 0 || req.Arguments[0] == "" {
		return nil, bad("arguments: no program to run")
	}
	c := &command{args: req.Arguments, workingDirectory: "."}
	for i, a := range c.args {
		if strings.ContainsRune(a, 0) {
			return nil, bad("arguments: number %d contains a NUL byte", i)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(req.EnvironmentVariables)) {
		v := req.EnvironmentVariables[k]
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, bad("environment_variables: %q is malformed", k)
		}
		c.env = append(c.env, k+"="+v)
	}
	var err error
	for _, f := range []struct {
		name, value string
		to          *string
		optional    bool
	}{
		{"input_root_directory", req.InputRootDirectory, &c.inputRoot, false},
		{"stdout_path", req.StdoutPath, &c.stdout, false},
		{"stderr_path", req.StderrPath, &c.stderr, false},
		{"temporary_directory", req.TemporaryDirectory, &c.temporary, true},
		{"server_logs_directory", req.ServerLogsDirectory, &c.serverLogs, true},
	} {
		if f.optional && f.value == "" {
			continue
		}
		if *f.to, err = cleanPath(f.name, f.value); err != nil {
			return nil, err
		}
		if *f.to == "." {
			return nil, bad("%s: %q is the build directory itself", f.name, f.value)
		}
		// Inside the input root it would count as an input and as an output.
		if strings.HasPrefix(*f.to+"/", c.inputRoot+"/") && f.to != &c.inputRoot {
			return nil, bad("%s: %q is inside the input root %q", f.name, f.value, c.inputRoot)
		}
	}
	if req.WorkingDirectory != "" {
		if c.workingDirectory, err = cleanPath("working_directory", req.WorkingDirectory); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// cleanPath returns a path of a request, clean. An empty or absolute path, or one with "..", is INVALID_ARGUMENT.
func cleanPath(field, p string) (string, error) {
	var why string
	switch {
	case p == "":
		why = "is missing"
	case path.IsAbs(p):
		why = "is absolute"
	case slices.Contains(strings.Split(p, "/"), ".."):
		why = `contains ".."`
	case strings.ContainsAny(p, "\x00\\"):
		why = "contains a NUL byte or a backslash"
	default:
		return path.Clean(p), nil
	}
	return "", status.Errorf(codes.InvalidArgument, "%s: %q %s; write a relative path without \"..\"", field, p, why)
}

// openInputRoot opens the input root and checks the working directory.
func (c *command) openInputRoot() (*os.Root, error) {
	if err := c.checkNoSymlinks("input_root_directory", c.inputRoot); err != nil {
		return nil, err
	}
	in, err := c.build.OpenRoot(c.inputRoot)
	if err != nil {
		return nil, pathError("input_root_directory", err)
	}
	if st, err := in.Stat(c.workingDirectory); err != nil || !st.IsDir() {
		in.Close()
		if err == nil {
			err = &fs.PathError{Op: "chdir", Path: c.workingDirectory, Err: syscall.ENOTDIR}
		}
		return nil, pathError("working_directory", err)
	}
	return in, nil
}

// checkNoSymlinks refuses a path with a component that is not a directory, because mounts do not follow symlinks.
func (c *command) checkNoSymlinks(field, p string) error {
	for i, b := range []byte(p + "/") {
		if b != '/' {
			continue
		}
		st, err := c.build.Lstat(p[:i])
		if err != nil {
			return pathError(field, err)
		}
		if !st.IsDir() {
			return status.Errorf(codes.InvalidArgument,
				"%s: %q is not a directory; symbolic links are not followed", field, p[:i])
		}
	}
	return nil
}

// pathError returns the error for a path of a request: INVALID_ARGUMENT, unless this host ran out of something.
func pathError(field string, err error) error {
	for _, ours := range []error{
		syscall.ENOSPC, syscall.EMFILE, syscall.ENFILE, syscall.EIO, syscall.ENOMEM, syscall.EROFS,
	} {
		if errors.Is(err, ours) {
			return fmt.Errorf("%s: %w", field, err)
		}
	}
	return status.Errorf(codes.InvalidArgument, "%s: %v", field, err)
}
