// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/spf13/cobra"
)

func casCatCommand() *cobra.Command {
	var from client.Server
	cmd := &cobra.Command{
		Use:   "cat DIGEST... [--server URL] [--instance NAME]",
		Short: "Print blobs",
		Long: `Cat writes blobs to standard output, in order. A blob that does not match its digest is written before the mismatch is
known; the exit code reports it. DIGEST may also be a prefix of at least 8 digits, or select an action in the server's
history: ^1 for the latest, or a target for its latest.

The exit code is 4 if a blob is absent, and 5 if the server cannot be reached.`,
		Example: `  cloister cas cat 9f2c...e1/142
  cloister cas cat 9f2c1e77                    # any 8 digits or more
  cloister cas cat blake3:77ab...02/310 | sha256sum`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := client.CheckNames(args...); err != nil {
				return err
			}
			return blobs.WithStore(cmd.Context(), &from, args, func(ctx context.Context, s *remote.Store) error {
				ds, err := blobs.FindAll(ctx, &from, s, args)
				if err != nil {
					return err
				}
				for _, d := range ds {
					r, err := s.Open(ctx, d, 0)
					if err != nil {
						return err
					}
					_, err = io.Copy(cmd.OutOrStdout(), r)
					if err = errors.Join(err, r.Close()); err != nil {
						return fmt.Errorf("blob %s: %w", d, err)
					}
				}
				return nil
			})
		},
	}
	from.Register(cmd)
	from.Complete(cmd)
	return cmd
}
