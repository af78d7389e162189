// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func cacheRmCommand() *cobra.Command {
	var store localstore.Store
	var instance string
	cmd := &cobra.Command{
		Use:   "rm ACTION... [--dir DIR] [--instance NAME]",
		Short: "Remove cached results so that their actions run again",
		Long: `Rm removes results from the local store of serve, whether or not serve is running. Blobs stay. The Remote Execution API
cannot remove results, so run this on the server's machine. A result that an upstream of serve (--cas, --store) also has
returns from there.

The exit code is 4 if a result was absent.`,
		Example: `  cloister cache rm 9f2c...e1/142
  cloister cache rm 9f2c...e1/142 --dir /var/cache/cloister --instance main`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ds, err := client.ParseDigests(args)
			if err != nil {
				return err
			}
			if err := cas.CheckInstanceName(instance); err != nil {
				return fmt.Errorf("--instance: %w", err)
			}
			return cacheRm(cmd.Context(), &store, instance, ds, cmd.OutOrStdout())
		},
	}
	store.Register(cmd)
	cmd.Flags().StringVar(&instance, "instance", "", "instance name")
	flags.AllowEmpty(cmd.Flags(), "instance")
	return cmd
}

func cacheRm(ctx context.Context, store *localstore.Store, instance string, actions []cas.Digest, out io.Writer) error {
	if err := store.Open(ctx); err != nil {
		return err
	}
	defer store.Close()
	rows, absent := []removed{}, false
	for _, d := range actions {
		was, err := store.Forget(ctx, instance, d)
		if err != nil {
			return exit.New(exit.Environment, fmt.Errorf("remove the result of action %s: %w", d, err))
		}
		rows, absent = append(rows, removed{d.String(), was}), absent || !was
		if store.JSON {
			continue
		}
		word := "removed"
		if !was {
			word = "absent"
		}
		if _, err := fmt.Fprintf(out, "%-8s %s\n", word, d); err != nil {
			return err
		}
	}
	if store.JSON {
		if err := render.JSON(out, rows); err != nil {
			return err
		}
	}
	if absent {
		return exit.New(exit.Absent, nil)
	}
	return nil
}

// A removed is what rm prints of an action.
type removed struct {
	Action   string `json:"action"`
	Recorded bool   `json:"recorded"` // there was a result
}
