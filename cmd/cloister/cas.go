// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func casCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cas",
		Short: "Puts blobs into a server's store, gets and lists them; says how full this machine's store is, and verifies it",
		Long: `Put, get, cat, ls and tree speak the Remote Execution API with the server that --cas names, of whatever make. So
do stat and verify when they are given digests; else they look at the store of serve on this machine, while serve runs and
while it does not: they ask the process that holds the store, or open the store where none does. What frees space is
cloister gc.

DIGEST is HASH/SIZE. The length of the hash says which function it is of: 64 digits are SHA-256, 40 SHA-1; of functions
that this cannot tell it begins with the name, as put prints it: blake3:HASH/SIZE.`,
		Example: `  cloister cas put src                         # prints the digest of its Directory
  cloister cas ls 77ab...02/310
  cloister cas cat 9f2c...e1/142
  cloister cas stat
  cloister cas verify --rate 50MiB`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(casPutCommand(), casGetCommand(), casCatCommand(), casLsCommand(), casTreeCommand(), casStatCommand(), casVerifyCommand())
	return cmd
}
