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
		Use:   "provenance ACTION --attest FILE [--key FILE] [--passphrase-file FILE] [--cas URL] [--instance NAME]",
		Short: "Writes how the recorded result of an action came about, as SLSA provenance",
		Long: `Provenance writes an in-toto Statement about the result that the action cache of a server has for an action: its
outputs are the subjects, and the predicate (SLSA provenance v1) says what the command was, which inputs and programs of
the worker's host went into it, and which worker made it, when. ACTION is HASH/SIZE, as messages print it, the beginning
of that, or ^1 for the action that the server was asked for last.

Most of that is what the worker recorded as the manifest of the run. Where the server has none, it is left out.

It exits with 4 if the action or a result of it is absent, and with 5 if the server cannot be reached.`,
		Example: `  cloister attest provenance 9f2c...e1/142 --attest app.intoto.json --key ~/.ssh/id_ed25519`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to.Path == "" {
				return errors.New("say where the statement goes by --attest FILE")
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
