// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

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
	var from client.Server
	var which client.Filter
	olderThan := flags.Duration(0)
	cmd := &cobra.Command{
		Use: "rm ACTION... [--dir DIR] [--instance NAME]\n" +
			"  cloister cache rm [--target LABEL] [--invocation ID] [--mnemonic NAME] [--older-than TIME]",
		Short: "Remove cached results so that their actions run again",
		Long: `Rm removes results from the local store of serve, whether or not serve is running. With --server and without --dir it
removes them from that server, which offers this only with --auth, to callers with the right operate. Blobs stay. A result
that an upstream of serve (--cas, --store) also has returns from there.

ACTION is a digest or, if the server of --server keeps a history, a prefix of 8 digits, ^1 for the latest action, or a
target. --target, --invocation, --mnemonic and --older-than select actions of that history. The exit code is 4 if the
result of an ACTION was absent, and 5 if the history is needed and the server cannot be reached.`,
		Example: `  cloister cache rm 9f2c...e1/142
  cloister cache rm --target '//server/...' --older-than 7d
  cloister cache rm ^1 --dir /var/cache/cloister --instance main`,
		RunE: func(cmd *cobra.Command, args []string) error {
			selects := which.Set() || olderThan > 0
			switch {
			case selects == (len(args) > 0):
				return errors.New("write actions, or select them with --target, --invocation, --mnemonic or --older-than")
			case olderThan < 0:
				return fmt.Errorf("--older-than %s: write a positive time", &olderThan)
			}
			instance, err := instanceOf(&from)
			if err != nil {
				return err
			}
			var ds []cas.Digest
			if selects {
				ds, err = from.Older(cmd.Context(), which, time.Now().Add(-time.Duration(olderThan)))
			} else {
				for _, arg := range args {
					var a client.Action
					if a, err = from.Action(cmd.Context(), arg); err != nil {
						break
					}
					ds = append(ds, a.Digest)
				}
			}
			if err == nil {
				instance, err = instanceOf(&from) // the actions or the build may have selected it
			}
			if err != nil {
				return err
			}
			return cacheRm(cmd.Context(), &store, instance, ds, selects, cmd.OutOrStdout())
		},
	}
	from.Register(cmd)
	store.Register(cmd, &from, []removed{})
	f := cmd.Flags()
	f.StringVar(&which.Target, "target", "", "only actions of this target; a trailing * matches every ending, /... the package and those below")
	f.StringVar(&which.Mnemonic, "mnemonic", "", "only actions of this kind")
	f.StringVar(&which.Invocation, "invocation", "", "only actions of this build: its id, at least 8 digits of it, or ^1 for the latest")
	f.Var(&olderThan, "older-than", "only actions that nobody requested for this time, such as 12h or 7d")
	flags.HideDefault(f, "older-than")
	from.Complete(cmd)
	return cmd
}

// instanceOf returns the instance that the flags select, which may be part of the server's address.
func instanceOf(from *client.Server) (string, error) {
	conn, instance, err := from.Dial()
	if err != nil {
		return "", err
	}
	_ = conn.Close()
	if err := cas.CheckInstanceName(instance); err != nil {
		return "", fmt.Errorf("--instance: %w", err)
	}
	return instance, nil
}

// cacheRm removes the results of actions. An absent one is no error if they were selected.
func cacheRm(ctx context.Context, store *localstore.Store, instance string, actions []cas.Digest, selected bool, out io.Writer) (err error) {
	if err := store.Open(ctx); err != nil {
		return err
	}
	defer store.Finish(&err)
	rows, absent := []removed{}, false
	for _, d := range actions {
		was, err := store.Forget(ctx, instance, d)
		if err != nil {
			return store.Explain(fmt.Errorf("remove the result of action %s: %w", d, err))
		}
		rows, absent = append(rows, removed{d.String(), was}), absent || !was
		if store.JSON || selected && !was {
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
	if absent && !selected {
		return exit.New(exit.Absent, nil)
	}
	return nil
}

// A removed is what rm prints of an action.
type removed struct {
	Action   string `json:"action"`
	Recorded bool   `json:"recorded"` // there was a result
}
