// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Shows and removes results in the action cache",
		Example: `  cloister cache show 9f2c...e1/142
  cloister cache rm 9f2c...e1/142`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(cacheShowCommand(), cacheRmCommand())
	return cmd
}
