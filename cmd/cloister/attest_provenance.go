// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/attestation"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/spf13/cobra"
)

func attestProvenanceCommand() *cobra.Command {
	var from client.Server
	var to attestation.Flags
	cmd := &cobra.Command{
		Use:   "provenance ACTION --attest FILE [--key FILE] [--passphrase-file FILE] [--server URL] [--instance NAME]",
		Short: "Write SLSA provenance of a cached result",
		Long: `Provenance writes an in-toto Statement about the cached result of an action. Its subjects are the outputs; its predicate,
SLSA provenance v1, describes the command, the inputs, the programs of the worker's host, the worker and the time.
ACTION is HASH/SIZE, as messages print it, or, if the server keeps a history, a prefix or ^1 for the latest one.

Most of this comes from the manifest of the run; without a manifest it is omitted.

The exit code is 4 if the action or its result is absent, and 5 if the server cannot be reached.`,
		Example: `  cloister attest provenance 9f2c...e1/142 --attest app.intoto.json --key ~/.ssh/id_ed25519`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to.Path == "" {
				return errors.New("--attest FILE is missing")
			}
			what, err := from.Action(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			key, err := to.Load(cmd.Context())
			if err != nil {
				return err
			}
			return client.WithStore(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				statement, err := attestation.OfResult(ctx, s, what.Digest)
				if err != nil {
					return err
				}
				return to.Write(ctx, statement, key)
			})
		},
	}
	from.Register(cmd)
	to.Register(cmd)
	return cmd
}
