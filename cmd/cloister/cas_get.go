// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

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
as an output directory: its contents are written below the directory PATH. DIGEST may also be a prefix of at least 8
digits, or select an action in the server's history, with --directory its input root: ^1 for the latest, or a target for
its latest.

The exit code is 4 if something is absent, and 5 if the server cannot be reached.`,
		Example: `  cloister cas get 9f2c...e1/142 action.bin
  cloister cas get 77ab...02/310 inputs --directory
  cloister cas get ^1 inputs --directory       # of the latest action`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := client.CheckNames(args[0]); err != nil {
				return err
			}
			return blobs.WithStore(cmd.Context(), &from, args[:1], func(ctx context.Context, s *remote.Store) error {
				d, err := blobs.Find(ctx, &from, s, args[0], directory)
				if err != nil {
					return err
				}
				if directory || message {
					return blobs.DownloadDirectory(ctx, s, d, message, args[1])
				}
				return blobs.Download(ctx, s, d, args[1])
			})
		},
	}
	from.Register(cmd)
	registerForms(cmd, &directory, &message)
	from.Complete(cmd)
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
