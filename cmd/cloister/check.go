// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/selftest"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/spf13/cobra"
)

func checkCommand() *cobra.Command {
	var box confinement.Flags
	var self, asJSON, fix, yes bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check which protections this machine supports",
		Long: `Check runs a probe in the sandbox and reports each protection: "ok" if it is enforced, "off" with the consequence if it
is not, and "FAIL" with a fix if it is required but missing. The exit code is 3 if actions cannot run here. It also lists
the other backends, and what each enforces here; cloister explain explains the codes of those that do not work.

With --selftest it also runs, twice, a program that attacks the sandbox, and reports for each guarantee whether it held:
no network, audited attempts, read-only inputs, an equal stable hash, and nothing left behind. The exit code is 1 if one
did not. With --fix it offers the commands that enable missing protections until the next boot, shows how to undo them,
asks before each, and checks again.`,
		Example: "  cloister check\n  cloister check --fix          # asks before each command\n  cloister check --selftest     # with real runs\n  cloister check --json | jq -r '.checks[] | select(.result != \"ok\") | [.name, .code, .fix] | @tsv'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := box.BackendConfig()
			if err != nil {
				return err
			}
			if _, err := box.LoadPolicy(); err != nil {
				return err
			}
			if yes && !fix {
				return errors.New("--yes needs --fix")
			}
			if err := check(cmd, &box, config, asJSON, fix, yes); err != nil || !self {
				return err
			}
			ctx, cancel := interrupt.Context(cmd.Context())
			defer cancel()
			interrupt.IgnoreBrokenPipe()
			return selftest.Run(ctx, &box, cmd.OutOrStdout(), nil)
		},
	}
	cmd.Flags().BoolVar(&fix, "fix", false, "offer to run the commands that enable missing protections")
	cmd.Flags().BoolVar(&yes, "yes", false, "with --fix, run commands that do not affect other programs without asking")
	cmd.Flags().BoolVar(&self, "selftest", false, "also test in two runs whether the sandbox keeps its guarantees")
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", &confinement.Report{})
	cmd.MarkFlagsMutuallyExclusive("json", "selftest")
	cmd.MarkFlagsMutuallyExclusive("json", "fix")
	box.Register(cmd)
	return cmd
}

// check prints the report of this machine, with fix after repairs.
func check(cmd *cobra.Command, box *confinement.Flags, config namespace.Config, asJSON, fix, yes bool) error {
	probe := func(ctx context.Context) (*confinement.Report, error) {
		backend := box.NewBackend(config)
		f, err := backend.Probe(ctx)
		report, toolErr := confinement.NewReport(ctx, f, err == nil)
		report.SetCode(err)
		report.Checks = append(report.Checks, box.Others(ctx)...)
		return report, errors.Join(err, toolErr, backend.Close())
	}
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	if fix {
		if !yes && !terminal.Is(os.Stdin) {
			return errors.New("--fix asks before each command: use it on a terminal, or add --yes")
		}
		var end func()
		ctx, end = interrupt.Context(ctx)
		defer end()
		r := confinement.Repairer{
			Probe: probe, Run: runRepair, Settings: "/proc/sys", Root: os.Geteuid() == 0, Yes: yes, In: cmd.InOrStdin(), Out: cmd.ErrOrStderr(),
		}
		probe = r.Repair
	}
	report, err := probe(ctx)
	if report != nil {
		write := report.WriteText
		if asJSON {
			write = func(out io.Writer) error { return render.JSON(out, report) }
		}
		err = errors.Join(err, write(out))
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

// runRepair runs a command on the terminal, where sudo may ask for a password.
func runRepair(ctx context.Context, command []string) error {
	c := exec.CommandContext(ctx, command[0], command[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stderr, os.Stderr
	return c.Run()
}
