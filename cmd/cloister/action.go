// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func actionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "action",
		Short: "Show or cancel the actions of a server",
		Example: `  cloister action ls
  cloister action show 9f2c...e1/142
  cloister action log -f 9f2c...e1/142
  cloister action cancel 9f2c...e1/142
  cloister action verdicts`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(actionLsCommand(), actionShowCommand(), actionLogCommand(), actionCancelCommand(), actionVerdictsCommand())
	return cmd
}
