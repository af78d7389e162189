// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Show and remove results in the action cache",
		Example: `  cloister cache show 9f2c...e1/142
  cloister cache rm 9f2c...e1/142`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(cacheShowCommand(), cacheRmCommand())
	return cmd
}
