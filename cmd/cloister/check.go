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
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
)

func checkCommand() *cobra.Command {
	var box confinement.Flags
	var self bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Says what this machine can enforce, and how to enable what it cannot",
		Long: `Check runs a probe in the sandbox and reports what it found, line by line: "ok" for what is enforced,
"off" for what is not enforced here and what is lost by it, "FAIL" for what is required and missing, with the
line that fixes it. It exits with 3 if actions cannot run here.

With --selftest it also makes two runs of a program that tries what it must not, and says of each promise
whether it was kept: no network, attempts that are audited, inputs that cannot be written, a stable hash
that is equal, and nothing left behind. It exits with 1 if one was not.`,
		Example: "  cloister check\n  cloister check --selftest     # by real runs",
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
			ctx, cancel := interrupt.Cleanup(cmd.Context())
			defer cancel()
			return selftest.Run(ctx, &box, cmd.OutOrStdout(), nil)
		},
	}
	cmd.Flags().BoolVar(&self, "selftest", false, "also prove by two runs that the sandbox keeps its promises")
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
	toolchain, toolErr := worker.HostToolchain()
	if toolErr == nil {
		fmt.Fprintf(out, "ok    %-24s", "toolchain of this host")
		for _, in := range toolchain {
			fmt.Fprintf(out, " %s", in.Target)
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "tier  %s\n", f.Tier)
	if err := errors.Join(err, toolErr); err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

// conditionsLine says which conditions a run can be given otherwise than usual.
func conditionsLine(given []sandbox.Condition) string {
	mark, can, cannot := "ok  ", "", ""
	for _, c := range sandbox.AllConditions {
		if slices.Contains(given, c) {
			can += ", " + string(c)
		} else {
			cannot += ", " + string(c)
		}
	}
	detail := "a run can be given another" + strings.TrimPrefix(can, ",")
	if cannot != "" {
		mark, detail = "off ", detail+"; not another"+strings.TrimPrefix(cannot, ",")
	}
	if can == "" {
		detail = "a run cannot be given others than usual"
	}
	return fmt.Sprintf("%s  %-24s %s", mark, "conditions", detail)
}
