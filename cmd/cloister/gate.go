// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/gate"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func gateCommand() *cobra.Command {
	var c gate.Config
	var schema bool
	cmd := &cobra.Command{
		Use:   "gate [--policy FILE] [--step ID]... [--mode report|enforce|strict] [--out DIR] [--json]",
		Short: "Run CI steps that must not touch the network",
		Long: `Gate runs the steps of a policy file in the sandbox, each on a clean checkout of a commit and without the environment
variables of the caller. It fails if a step tries to reach the network or to listen on it, even if the step ignores the
error, unless the policy has an exception. It leaves a report and the logs as evidence in DIR/COMMIT; see docs/gate.md.

Violations are recorded in mode report, fail the gate in mode enforce, and strict also requires the full sandbox. Values
of sensitive environment variables are removed from the evidence.

The exit code is 0 if all steps succeeded, 1 if a command failed, 2 if the policy or the command line is invalid, 3 if
this machine cannot run the steps as the mode requires, 4 after a violation, and 128+N after signal N.`,
		Example: `  cloister gate                                   # docs/ci/HERMETIC_CI_POLICY.yml, on HEAD
  cloister gate --step unit-tests --mode report
  cloister gate --mode strict --attest gate.intoto.json --key ~/.ssh/id_ed25519
  cloister gate --schema                          # of policy files, for editors`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Stdout, c.Notes = cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr())
			if schema {
				_, err := fmt.Fprint(c.Stdout, gate.Schema)
				return err
			}
			ctx, cancel := interrupt.Context(cmd.Context())
			defer cancel()
			interrupt.IgnoreBrokenPipe()
			code, err := gate.Run(ctx, &c)
			switch {
			case err != nil:
				return err
			case code != 0:
				return exit.New(code, nil)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Policy, "policy", gate.DefaultPolicy, "file with the hermetic steps")
	f.StringArrayVar(&c.Steps, "step", nil, "ID of a step to run; repeatable (default: all steps)")
	f.StringVar(&c.Mode, "mode", gate.DefaultMode, "effect of violations: report, enforce or strict")
	f.StringVar(&c.Out, "out", gate.DefaultOut, "directory for the evidence")
	f.StringVar(&c.Revision, "revision", "HEAD", "commit to run on, in the repository of the working directory")
	f.BoolVar(&c.Fallback, "fallback", false, "if no sandbox is possible, run steps without one and record them with strace or ss")
	f.StringVar(&c.Prometheus, "prometheus", "", "file for metrics in the Prometheus text format")
	render.JSONFlag(f, &c.JSON, "print the report as JSON", &gate.Report{})
	f.BoolVar(&schema, "schema", false, "print the JSON schema of policy files and exit")
	c.Sandbox.RegisterTier(cmd)
	c.Attest.Register(cmd)
	return cmd
}
