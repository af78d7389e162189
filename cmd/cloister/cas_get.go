// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/spf13/cobra"
)

func casGetCommand() *cobra.Command {
	var from client.Server
	var directory, message bool
	cmd := &cobra.Command{
		Use:   "get DIGEST PATH [--server URL] [--instance NAME] [--directory | --tree]",
		Short: "Download a blob or a directory",
		Long: `Get writes a blob to the file PATH, which appears only once the blob has arrived and matches its digest. With
--directory, DIGEST is that of a Directory message, such as an input root, and with --tree that of a Tree message, such
as an output directory: its contents are written below the directory PATH.

The exit code is 4 if something is absent, and 5 if the server cannot be reached.`,
		Example: `  cloister cas get 9f2c...e1/142 action.bin
  cloister cas get 77ab...02/310 inputs --directory`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := cas.ParseDigest(args[0])
			if err != nil {
				return err
			}
			return client.WithStore(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				if directory || message {
					return blobs.DownloadDirectory(ctx, s, d, message, args[1])
				}
				return blobs.Download(ctx, s, d, args[1])
			})
		},
	}
	from.Register(cmd)
	registerForms(cmd, &directory, &message)
	return cmd
}

// registerForms adds the flags for the message that a digest names.
func registerForms(cmd *cobra.Command, directory, message *bool) {
	if directory != nil {
		cmd.Flags().BoolVar(directory, "directory", false, "DIGEST names a Directory message")
	}
	cmd.Flags().BoolVar(message, "tree", false, "DIGEST names a Tree message, as results do for output directories")
	if directory != nil {
		cmd.MarkFlagsMutuallyExclusive("directory", "tree")
	}
}
