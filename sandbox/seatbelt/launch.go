// SPDX-License-Identifier: Apache-2.0

package seatbelt

import (
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

// What every run executes under its profile before the command.
const (
	shell    = "/bin/dash"
	setEnv   = "/usr/bin/env"
	report   = `echo confined >&3; exec 3>&-; exec "$0" "$@"`
	confined = "confined\n"
)

// launch returns the arguments of the shell that sets the limit of open files and becomes sandbox-exec, which reads the
// profile from a file because profiles with many inputs are longer than arguments may be. Under the profile, another
// shell writes to descriptor 3 that it is confined and closes it. Then env sets the variables of the run, some of which
// would act on the programs before it.
func launch(spec *sandbox.Spec, placed *placement.Run, profile, file string) ([]string, error) {
	if strings.Contains(file, "=") {
		return nil, fmt.Errorf("%w: the path %s of the program contains an equals sign", sandbox.ErrUnsupported, file)
	}
	script := `exec "$0" "$@"`
	if n := spec.Limits.OpenFiles; n != sandbox.Unlimited {
		script = "ulimit -n " + strconv.FormatInt(n, 10) + " 2>&3 || exit; " + script
	}
	return slices.Concat([]string{"-c", script, launcher, "-f", profile, shell, "-c", report, setEnv, "-i", "--"},
		placed.Env, []string{file}, placed.Args[1:]), nil
}

// launchError returns an error unless the prologue, the text written to descriptor 3, shows that the run was confined.
// Any later failure is the command's own: env has the exit codes of a shell for a program that it cannot execute.
func launchError(prologue, stderr string) error {
	if prologue == confined {
		return nil
	}
	reason, _, _ := strings.Cut(prologue+stderr, "\n")
	return fmt.Errorf("start of the run: sandbox-exec did not confine it: %q", reason)
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
