// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"
)

func attestCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "attest",
		Short: "Write and verify statements about actions",
		Example: `  cloister repro --attest app.intoto.json --key ~/.ssh/id_ed25519 9f2c...e1/142
  cloister attest provenance 9f2c...e1/142 --attest app.intoto.json --key ~/.ssh/id_ed25519
  cloister attest verify app.intoto.json --key builders.pub`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(attestProvenanceCommand(), attestVerifyCommand())
	return cmd
}
