// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
)

func actionShowCommand() *cobra.Command {
	var from client.Server
	var asJSON, record, failed bool
	cmd := &cobra.Command{
		Use:   "show DIGEST [--failed] [--server URL] [--instance NAME] [--json | --manifest]",
		Short: "Show an action and its result",
		Long: `Show prints the command of an action, its environment, platform and inputs, and the result of its latest run.
Failures are not cached, but servers that keep a history have them. With --failed show prints the latest failure, even
if the action succeeded later.

DIGEST is HASH/SIZE, as messages and logs print it. If the server keeps a history, it can also be a prefix of at least
8 digits, ^1 for the latest action, ^2 for the one before, or a target such as //pkg:name. With --manifest show prints
only the manifest of the run that made the result; equal runs have manifests with equal stable hashes.

The exit code is 4 if the action, its command or the manifest is absent, and 5 if the server cannot be reached.`,
		Example: `  cloister action show e3b0...55/142
  cloister action show ^1
  cloister action show --failed //server:test
  cloister action show ^1 --manifest | sed '/^volatile$/,$d' | sha256sum    # the stable hash
  cloister action show e3b0c442 --server grpc://build.example.com:8980 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			what, err := from.Action(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			store, err := from.Open(cmd.Context())
			if err != nil {
				return err
			}
			defer store.Close()
			a, err := actions.Describe(cmd.Context(), &from, store, what.Digest, failed)
			if err != nil {
				return from.Explain(err, 1)
			}
			if record {
				text, err := a.Manifest(cmd.Context(), store)
				if err != nil {
					return from.Explain(err, 1)
				}
				_, err = io.WriteString(cmd.OutOrStdout(), text)
				return err
			}
			if asJSON {
				return a.WriteJSON(cmd.OutOrStdout())
			}
			return a.WriteText(cmd.OutOrStdout())
		},
	}
	from.Register(cmd)
	cmd.Flags().BoolVar(&failed, "failed", false, "show the latest failure, even if the action succeeded later")
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object with messages of the API", &actions.Object{})
	cmd.Flags().BoolVar(&record, "manifest", false, "print the manifest of the run that made the result")
	cmd.MarkFlagsMutuallyExclusive("json", "manifest")
	from.Complete(cmd)
	return cmd
}
