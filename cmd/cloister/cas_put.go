// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
)

func casPutCommand() *cobra.Command {
	var to client.Server
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "put PATH... [--cas URL] [--instance NAME] [--digest-function FUNCTION] [--json]",
		Short: "Uploads files and directories, and prints their digests",
		Long: `Put uploads each PATH to the store of a server, and prints its digest and the path. Of a directory that is
the digest of the Directory message that an action names as its input root; everything in it is uploaded, symlinks
as they are. The path - is the standard input. What is present already is not sent again.`,
		Example: `  cloister cas put main.c
  cloister cas put src --digest-function blake3
  echo hello | cloister cas put - --cas grpcs://cache.example.com:443`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			function, err := cas.ParseFunction(name)
			if err != nil {
				return fmt.Errorf("--digest-function: %w", err)
			}
			for _, arg := range args {
				if _, err := os.Stat(arg); err != nil && arg != "-" {
					return fmt.Errorf("%s: %w", arg, errors.Unwrap(err))
				}
			}
			var rows []uploaded
			err = client.WithStore(cmd.Context(), &to, func(ctx context.Context, s *remote.Store) error {
				for _, arg := range args {
					d, err := blobs.Upload(ctx, s, function, arg, cmd.InOrStdin())
					if err != nil {
						return fmt.Errorf("%s: %w", arg, err)
					}
					rows = append(rows, uploaded{d.String(), arg})
					if asJSON {
						continue
					}
					if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", d, arg); err != nil {
						return err
					}
				}
				return nil
			})
			if err == nil && asJSON {
				err = render.JSON(cmd.OutOrStdout(), rows)
			}
			return err
		},
	}
	to.Register(cmd)
	cmd.Flags().StringVar(&name, "digest-function", cas.SHA256.String(), "function of the digests")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON list")
	return cmd
}

// An uploaded is what put prints of a path.
type uploaded struct {
	Digest string `json:"digest"`
	Path   string `json:"path"`
}
