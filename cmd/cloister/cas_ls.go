// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"path"
	"strings"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func casLsCommand() *cobra.Command {
	return listingCommand("ls", false, "List a directory",
		`Ls prints the entries of a directory: kind, executable bit, size, name and digest. DIGEST is that of a Directory
message, such as an input root, or with --tree that of a Tree message, such as an output directory. PATH selects a
directory or an entry below it. DIGEST may also be a prefix of at least 8 digits, or select the input root
of an action in the server's history: ^1 for the latest, or a target for its latest.

The exit code is 4 if a Directory or the path is absent, and 5 if the server cannot be reached.`,
		`  cloister cas ls 77ab...02/310
  cloister cas ls ^1                           # the inputs of the latest action
  cloister cas ls 77ab...02/310 external/zlib --json`)
}

func casTreeCommand() *cobra.Command {
	return listingCommand("tree", true, "List a directory recursively",
		`Tree prints a directory and everything below it, one line per entry with its path. It marks absent directories and
continues. DIGEST and PATH are as for cloister cas ls.

The exit code is 4 if something is absent, and 5 if the server cannot be reached.`,
		`  cloister cas tree 77ab...02/310
  cloister cas tree 1f0c...99/88 --tree`)
}

func listingCommand(name string, deep bool, short, long, example string) *cobra.Command {
	var from client.Server
	var message, asJSON bool
	cmd := &cobra.Command{
		Use:     name + " DIGEST [PATH] [--tree] [--server URL] [--instance NAME] [--json]",
		Short:   short,
		Long:    long,
		Example: example,
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := client.CheckNames(args[0]); err != nil {
				return err
			}
			below := "."
			if len(args) > 1 {
				below = path.Clean(strings.Trim(args[1], "/"))
			}
			l := &blobs.Listing{Out: cmd.OutOrStdout(), JSON: asJSON, Rows: []blobs.Entry{}}
			err := blobs.WithStore(cmd.Context(), &from, args[:1], func(ctx context.Context, s *remote.Store) error {
				l.Store = s
				d, err := blobs.Find(ctx, &from, s, args[0], !message)
				if err != nil {
					return err
				}
				if message {
					if err := l.Unpack(ctx, d); err != nil {
						return err
					}
				}
				return l.PrintPath(ctx, d, below, deep)
			})
			if err == nil && asJSON {
				err = render.JSON(l.Out, l.Rows)
			}
			if err == nil && l.Absent {
				err = exit.New(exit.Absent, nil)
			}
			return err
		},
	}
	from.Register(cmd)
	registerForms(cmd, nil, &message)
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []blobs.Entry{})
	from.Complete(cmd)
	return cmd
}
