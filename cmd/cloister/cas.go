// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func casCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cas",
		Short: "Move blobs, and inspect and verify stores",
		Long: `Put, get, cat, ls and tree use the Remote Execution API of the server of --server. So do stat and verify with digests;
without digests they examine the local store of serve, whether or not serve is running. To free space, use cloister gc.

DIGEST is HASH/SIZE. The length of the hash implies the function: 64 digits are SHA-256, 40 are SHA-1. Other functions
prefix their name, as put prints it: blake3:HASH/SIZE.`,
		Example: `  cloister cas put src                         # prints the digest of its Directory
  cloister cas ls 77ab...02/310
  cloister cas cat 9f2c...e1/142
  cloister cas stat
  cloister cas verify --rate 50MiB`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(casPutCommand(), casGetCommand(), casCatCommand(), casLsCommand(), casTreeCommand(), casStatCommand(), casVerifyCommand())
	return cmd
}
