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
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/spf13/cobra"
)

func casPutCommand() *cobra.Command {
	var to client.Server
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "put PATH... [--server URL] [--instance NAME] [--digest-function FUNCTION] [--json]",
		Short: "Upload files and directories",
		Long: `Put uploads each PATH to the store of a server, and prints its digest and the path. For a directory it uploads all
contents, with symlinks as such, and prints the digest of its Directory message, which an action can name as its input
root. The path - is standard input. Blobs already present are not sent again.`,
		Example: `  cloister cas put main.c
  cloister cas put src --digest-function blake3
  echo hello | cloister cas put - --server grpcs://cache.example.com:443`,
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
					line := terminal.NewProgress(unlessQuiet(cmd, cmd.ErrOrStderr()), render.Quote(arg)+"  ")
					d, err := blobs.Upload(ctx, s, function, arg, cmd.InOrStdin(), line)
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
	cmd.Flags().StringVar(&name, "digest-function", cas.SHA256.String(), "digest function")
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []uploaded{})
	return cmd
}

// An uploaded is what put prints of a path.
type uploaded struct {
	Digest string `json:"digest"`
	Path   string `json:"path"`
}
