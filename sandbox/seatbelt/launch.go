// SPDX-License-Identifier: Apache-2.0

package seatbelt

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/placement"
)

// launcher is the system's program that applies a profile and executes the command in its place.
const launcher = "/usr/bin/sandbox-exec"

// launch returns the arguments of the shell that sets the limit of open files and becomes sandbox-exec, which reads the
// profile from a file because profiles with many inputs are longer than arguments may be. The shell runs without a
// profile, so it must not see the variables of the run, from which shells import functions: env sets them. What it
// writes to descriptor 3 says why it did not become sandbox-exec; the run never has that descriptor.
func launch(spec *sandbox.Spec, placed *placement.Run, profile, file string) []string {
	script := `exec "$0" "$@" 3>&-`
	if n := spec.Limits.OpenFiles; n != sandbox.Unlimited {
		script = "ulimit -n " + strconv.FormatInt(n, 10) + " 2>&3 || exit; " + script
	}
	return slices.Concat([]string{"-c", script, "/usr/bin/env", "-i", "--"}, placed.Env,
		[]string{launcher, "-f", profile, file}, placed.Args[1:])
}

// checkEnv refuses the variables that act on sandbox-exec itself, before it applies the profile: those of the dynamic
// linker and the allocator.
func checkEnv(env []string) error {
	for _, v := range env {
		if strings.HasPrefix(v, "DYLD_") || strings.HasPrefix(v, "Malloc") {
			name, _, _ := strings.Cut(v, "=")
			return fmt.Errorf("%w: the variable %s would act outside the sandbox seatbelt", sandbox.ErrUnsupported, name)
		}
	}
	return nil
}

// A head passes on what is written, and keeps its beginning.
type head struct {
	w    io.Writer // nil discards
	text []byte
}

func (h *head) Write(p []byte) (int, error) {
	h.text = append(h.text, p[:min(len(p), 1024-len(h.text))]...)
	if h.w == nil {
		return len(p), nil
	}
	return h.w.Write(p)
}

// Exit codes of sandbox-exec for a wrong profile and a failed system call (sysexits(3)).
const (
	exitData   = 65
	exitSystem = 71
)

// launchError returns an error if sandbox-exec ended with this exit code instead of executing file: NotExecuted if the
// kernel refused the file, and otherwise one with its message. A command that imitates a message about its profile
// fails as an error instead of a result.
func (h *head) launchError(code int, file string) error {
	line, _, _ := strings.Cut(string(h.text), "\n")
	refused := "sandbox-exec: execvp() of '" + file + "' failed: "
	switch {
	case code == exitData && strings.HasPrefix(line, "sandbox-exec: "):
		return errors.New(line)
	case code == exitSystem && strings.HasPrefix(line, refused):
		return &placement.NotExecuted{ExitCode: 126, Reason: file + ": " + strings.TrimPrefix(line, refused)}
	}
	return nil
}
