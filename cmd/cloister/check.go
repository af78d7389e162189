// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/selftest"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/spf13/cobra"
)

func checkCommand() *cobra.Command {
	var box confinement.Flags
	var self, asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check which protections this machine supports",
		Long: `Check runs a probe in the sandbox and reports each protection: "ok" if it is enforced, "off" with the consequence if it
is not, and "FAIL" with a fix if it is required but missing. The exit code is 3 if actions cannot run here.

With --selftest it also runs a program twice that attacks the sandbox, and reports for each guarantee whether it held:
no network, audited attempts, read-only inputs, an equal stable hash, and nothing left behind. The exit code is 1 if one
did not.`,
		Example: "  cloister check\n  cloister check --selftest     # with real runs\n  cloister check --json | jq -r '.checks[] | select(.result != \"ok\").fix'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := box.BackendConfig()
			if err != nil {
				return err
			}
			if _, err := box.LoadPolicy(); err != nil {
				return err
			}
			backend := namespace.New(config)
			err = check(cmd.Context(), backend, asJSON, cmd.OutOrStdout())
			err = errors.Join(err, backend.Close())
			if err != nil || !self {
				return err
			}
			ctx, cancel := interrupt.Context(cmd.Context())
			defer cancel()
			interrupt.IgnoreBrokenPipe()
			return selftest.Run(ctx, &box, cmd.OutOrStdout(), nil)
		},
	}
	cmd.Flags().BoolVar(&self, "selftest", false, "also prove by two runs that the sandbox keeps its guarantees")
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", &confinement.Report{})
	cmd.MarkFlagsMutuallyExclusive("json", "selftest")
	box.Register(cmd)
	return cmd
}

func check(ctx context.Context, backend sandbox.Backend, asJSON bool, out io.Writer) error {
	f, err := backend.Probe(ctx)
	report, toolErr := confinement.NewReport(ctx, f, err == nil)
	write := report.WriteText
	if asJSON {
		write = func(out io.Writer) error { return render.JSON(out, report) }
	}
	if err := errors.Join(err, toolErr, write(out)); err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}
