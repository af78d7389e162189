// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// A repair is a command that enables a protection until the next boot, and the one that reverts it.
type repair struct {
	command, undo []string
	// risk is what the command also permits other programs, or "". Only a person can accept it.
	risk string
}

// Settings that a repair may change. Nothing else that a check advises is executed.
var (
	settings = regexp.MustCompile(`^(user\.max_[a-z]+_namespaces|fs\.protected_hardlinks|` +
		`kernel\.unprivileged_userns_clone|kernel\.apparmor_restrict_unprivileged_userns)=([0-9]{1,6})$`)
	overlayModule = []string{"modprobe", "overlay"}
)

// A Repairer runs the repairs of a machine.
type Repairer struct {
	// Probe checks the machine. Its error says that actions cannot run.
	Probe func(context.Context) (*Report, error)
	// Run executes a command. Its error does not contain the command.
	Run func(ctx context.Context, command []string) error
	// Settings is the directory of the kernel's settings, /proc/sys.
	Settings string
	// Root says that commands need no sudo.
	Root bool
	// Yes accepts every repair without a known risk for other programs. Otherwise In has the answers; nil refuses all.
	Yes bool
	In  io.Reader
	Out io.Writer
}

// Repair checks the machine, offers each repair that a failed check advises, runs those that are accepted, and checks
// again, until no new repair is advised. It returns the report and the error of the last check. It stops at the first
// command that fails, since later ones may depend on it.
func (r *Repairer) Repair(ctx context.Context) (*Report, error) {
	in := r.In
	if in == nil {
		in = strings.NewReader("")
	}
	answers := bufio.NewReader(in)
	seen := map[string]bool{}
	for {
		report, err := r.Probe(ctx)
		if report == nil || ctx.Err() != nil {
			return nil, errors.Join(err, ctx.Err())
		}
		ran := false
		for _, c := range report.Checks {
			if c.Result == "ok" || c.Fix == "" || seen[c.Fix] {
				continue
			}
			seen[c.Fix] = true
			done, failed := r.offer(ctx, answers, c)
			if failed != nil {
				return report, failed
			}
			ran = ran || done
		}
		if !ran {
			return report, err
		}
	}
}

// offer runs the repair of c, and reports whether it did.
func (r *Repairer) offer(ctx context.Context, answers *bufio.Reader, c Check) (bool, error) {
	fix := r.parse(c.Fix)
	if fix == nil {
		fmt.Fprintf(r.Out, "%s: not automatic: %s\n", c.Name, c.Fix)
		return false, nil
	}
	fmt.Fprintf(r.Out, "%s: %s\n  run   %s\n  undo  %s (lasts until the next boot)\n", c.Name, c.Detail, strings.Join(fix.command, " "), strings.Join(fix.undo, " "))
	if fix.risk != "" {
		fmt.Fprintf(r.Out, "  risk  %s\n", fix.risk)
	}
	switch {
	case r.Yes && fix.risk != "":
		fmt.Fprintln(r.Out, "  skipped: --yes accepts no risks; run it yourself, or use --fix on a terminal")
		return false, nil
	case !r.Yes:
		fmt.Fprint(r.Out, "run it? [y/N] ")
		text, _ := answers.ReadString('\n') // the end of input is a no
		if answer := strings.ToLower(strings.TrimSpace(text)); answer != "y" && answer != "yes" {
			fmt.Fprintln(r.Out, "  skipped")
			return false, nil
		}
	}
	if err := r.Run(ctx, fix.command); err != nil {
		return false, exit.New(exit.Environment, fmt.Errorf("%s: %w", strings.Join(fix.command, " "), err))
	}
	return true, nil
}

// parse returns the repair for the advice of a check, or nil if the advice is not a permitted command or cannot be
// undone.
func (r *Repairer) parse(advice string) *repair {
	line, _, _ := strings.Cut(advice, ", or ")
	words := strings.Fields(line)
	if len(words) < 3 || words[0] != "sudo" {
		return nil
	}
	command := words[1:]
	fix := &repair{}
	switch {
	case slices.Equal(command, overlayModule):
		fix.undo = []string{"modprobe", "-r", "overlay"}
	case len(command) == 3 && command[0] == "sysctl" && command[1] == "-w" && settings.MatchString(command[2]):
		m := settings.FindStringSubmatch(command[2])
		old, err := os.ReadFile(filepath.Join(r.Settings, strings.ReplaceAll(m[1], ".", "/")))
		value := strings.TrimSpace(string(old))
		if err != nil || value == m[2] || !settings.MatchString(m[1]+"="+value) {
			return nil
		}
		fix.undo = []string{"sysctl", "-w", m[1] + "=" + value}
		if strings.Contains(m[1], "userns") || m[1] == "user.max_user_namespaces" {
			fix.risk = "every program of this machine may create user namespaces, which have exposed flaws of kernels"
		}
	default:
		return nil
	}
	fix.command = command
	if !r.Root {
		fix.command, fix.undo = words, append([]string{"sudo"}, fix.undo...)
	}
	return fix
}
