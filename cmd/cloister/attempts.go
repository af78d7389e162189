// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/cloister-build/cloister/cmd/cloister/internal/selftest"
	"github.com/spf13/cobra"
)

func attemptsCommand() *cobra.Command {
	return &cobra.Command{
		Use: selftest.Command + " ADDRESS", Hidden: true, Args: cobra.ExactArgs(1),
		Short:   "Attempt forbidden operations for check --selftest",
		Example: "  cloister check --selftest",
		RunE: func(cmd *cobra.Command, args []string) error {
			return selftest.Attempts(cmd.Context(), args[0], cmd.OutOrStdout())
		},
	}
}
