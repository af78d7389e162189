// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/selftest"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/toolchain"
	"github.com/spf13/cobra"
)

func checkCommand() *cobra.Command {
	var box confinement.Flags
	var self bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check which protections this machine supports",
		Long: `Check runs a probe in the sandbox and reports each protection: "ok" if it is enforced, "off" with the consequence if it
is not, and "FAIL" with a fix if it is required but missing. The exit code is 3 if actions cannot run here.

With --selftest it also runs a program twice that attacks the sandbox, and reports for each guarantee whether it held:
no network, audited attempts, read-only inputs, an equal stable hash, and nothing left behind. The exit code is 1 if one
did not.`,
		Example: "  cloister check\n  cloister check --selftest     # with real runs",
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
			err = check(cmd.Context(), backend, cmd.OutOrStdout())
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
	box.Register(cmd)
	return cmd
}

func check(ctx context.Context, backend sandbox.Backend, out io.Writer) error {
	f, err := backend.Probe(ctx)
	for _, c := range f.Checks {
		mark := "ok  "
		switch {
		case !c.OK && c.Required:
			mark = "FAIL"
		case !c.OK:
			mark = "off "
		}
		fmt.Fprintf(out, "%s  %-24s %s\n", mark, c.Name, c.Detail)
		if c.Fix != "" {
			fmt.Fprintf(out, "      %-24s fix: %s\n", "", c.Fix)
		}
	}
	if err == nil {
		fmt.Fprintln(out, conditionsLine(f.Conditions))
	}
	inputs, toolErr := sandbox.HostToolchain()
	if toolErr == nil {
		fmt.Fprintf(out, "ok    %-24s", "toolchain of this host")
		for _, in := range inputs {
			fmt.Fprintf(out, " %s", in.Target)
		}
		fmt.Fprintln(out)
		var scan *toolchain.Scan
		if scan, toolErr = toolchain.Read(ctx, inputs); toolErr == nil {
			fmt.Fprintf(out, "ok    %-24s %s of %d files\n", "fingerprint", scan.Fingerprint, scan.Entries)
		}
	}
	fmt.Fprintf(out, "tier  %s\n", confinement.TierText(f))
	if err := errors.Join(err, toolErr); err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

// conditionsLine describes which conditions of a run can be varied.
func conditionsLine(given []sandbox.Condition) string {
	mark, can, cannot := "ok  ", "", ""
	for _, c := range sandbox.AllConditions {
		if slices.Contains(given, c) {
			can += ", " + string(c)
		} else {
			cannot += ", " + string(c)
		}
	}
	detail := "runs can vary" + strings.TrimPrefix(can, ",")
	if cannot != "" {
		mark, detail = "off ", detail+"; but not"+strings.TrimPrefix(cannot, ",")
	}
	if can == "" {
		detail = "runs cannot vary any"
	}
	return fmt.Sprintf("%s  %-24s %s", mark, "conditions", detail)
}
