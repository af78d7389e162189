// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"maps"
	"math"
	"os"
	"path"
	"slices"
	"strings"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A command is a request that was checked. Its paths are clean, and relative to the build directory.
type command struct {
	build                 *os.Root // the build directory
	args, env             []string
	workingDirectory      string // relative to the input root
	inputRoot             string
	stdout, stderr        string
	serverLogs, temporary string // "" if the request names none
}

// read checks what can be known of a request without a look at the disk. It fails with INVALID_ARGUMENT, naming the field.
func (r *Runner) read(req *runnerpb.RunRequest) (*command, error) {
	bad := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	if len(req.Arguments) == 0 || req.Arguments[0] == "" {
		return nil, bad("arguments: there is no program to run")
	}
	c := &command{args: req.Arguments}
	for i, a := range c.args {
		if strings.ContainsRune(a, 0) {
			return nil, bad("arguments: number %d contains NUL", i)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(req.EnvironmentVariables)) {
		v := req.EnvironmentVariables[k]
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, bad("environment_variables: %q cannot be set", k)
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
		if *f.to, err = local(f.name, f.value); err != nil {
			return nil, err
		}
		if *f.to == "." {
			return nil, bad("%s: %q is the build directory itself", f.name, f.value)
		}
		// In it, what is the runner's would be taken for an input, and for an output.
		if strings.HasPrefix(*f.to+"/", c.inputRoot+"/") && f.to != &c.inputRoot {
			return nil, bad("%s: %q lies in the input root %q", f.name, f.value, c.inputRoot)
		}
	}
	if c.workingDirectory = "."; req.WorkingDirectory != "" {
		if c.workingDirectory, err = local("working_directory", req.WorkingDirectory); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// local returns a path of a request, clean. What is absolute, says ".." or is nothing is INVALID_ARGUMENT.
func local(field, p string) (string, error) {
	why := ""
	switch {
	case p == "":
		why = "is missing"
	case path.IsAbs(p):
		why = "is absolute"
	case slices.Contains(strings.Split(p, "/"), ".."):
		why = `says ".."`
	case strings.ContainsAny(p, "\x00\\"):
		why = "contains NUL or a backslash"
	default:
		return path.Clean(p), nil
	}
	return "", status.Errorf(codes.InvalidArgument, "%s: %q %s; write a path below the directory that it is relative to", field, p, why)
}

const notice = "\ncloister: output cut off here: it reached its limit\n"

// A log is stdout or stderr of a command: a file that the client reads. Each takes as many bytes as all outputs may: what a
// command says must not fill the disk of all others.
type log struct {
	file *os.File
	left int64
	cut  bool
}

// newLog makes the file. That it is there already is the client's fault.
func (r *Runner) newLog(c *command, field, p string) (*log, error) {
	f, err := c.build.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, unusable(field, err)
	}
	l := &log{file: f, left: r.grant.Limits.OutputBytes}
	if l.left == sandbox.Unlimited {
		l.left = math.MaxInt64
	}
	return l, nil
}

// Write keeps what there is room for, then one notice, and no more. A command is never held up by it.
func (l *log) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), l.left)]
	if _, err := l.file.Write(keep); err != nil {
		return 0, err
	}
	l.left -= int64(len(keep))
	if len(keep) < len(p) && !l.cut {
		l.cut = true
		if _, err := l.file.WriteString(notice); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// maxAdded is how many lines of ours a failed command has at the end of its stderr.
const maxAdded = 5

// add adds lines of ours, which are worth knowing now that the command failed.
func (l *log) add(lines []string) error {
	for _, line := range lines[:min(len(lines), maxAdded)] {
		if _, err := l.file.WriteString("cloister: " + line + "\n"); err != nil {
			return err
		}
	}
	return nil
}
