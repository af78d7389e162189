// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Shows and removes results in the action cache",
		Example: `  cloister cache show 9f2c...e1/142
  cloister cache rm 9f2c...e1/142`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(cacheShowCommand(), cacheRmCommand())
	return cmd
}

func cacheShowCommand() *cobra.Command {
	var from origin
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ACTION [--cas URL] [--instance NAME] [--json]",
		Short: "Says what result is recorded for an action, who made it, and whether it can be used",
		Long: `Show prints the result that the action cache of a server has for an action: exit code, outputs, who made it and
when, and how many of the blobs that it refers to the server has. ACTION is the digest of an Action, HASH/SIZE, as
messages and logs print it; the Action itself need not be there.

It exits with 4 if no result is recorded, or none that can be used, and with 5 if the server cannot be reached.`,
		Example: `  cloister cache show 9f2c...e1/142
  cloister cache show 9f2c...e1/142 --cas grpc://cache.example.com:9092 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			action, err := cas.ParseDigest(args[0])
			if err != nil {
				return err
			}
			return onServer(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				r, err := s.Lookup(ctx, action)
				if err != nil {
					return err
				}
				ds, missing, err := referred(ctx, s, action.Function(), r)
				if err != nil {
					return err
				}
				if asJSON {
					return entryJSON(cmd.OutOrStdout(), action, s.Name(), r, ds, missing)
				}
				p := &page{w: cmd.OutOrStdout()}
				p.line("action", action.String())
				if s.Name() != "" {
					p.line("instance", quote(s.Name()))
				}
				p.result(r)
				p.line("refers to", fmt.Sprintf("%d blobs, %d of them absent", len(ds), len(missing)))
				for _, d := range missing {
					p.line("absent", d.String())
				}
				return p.err
			})
		},
	}
	from.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with the result as a message of the API")
	return cmd
}

// referred returns the blobs that a result refers to, and those of them that are absent. A Tree that is absent hides what
// is in it.
func referred(ctx context.Context, s *remote.Store, f cas.Function, r *repb.ActionResult) (ds, missing []cas.Digest, err error) {
	ds, err = cas.Closure(ctx, s, f, r)
	if errors.Is(err, cas.ErrNotFound) {
		r := &repb.ActionResult{OutputFiles: r.OutputFiles, StdoutDigest: r.StdoutDigest, StderrDigest: r.StderrDigest}
		if ds, err = cas.Closure(ctx, s, f, r); err != nil {
			return nil, nil, err
		}
	}
	if err != nil {
		return nil, nil, err
	}
	for _, o := range r.OutputDirectories {
		for _, p := range []*repb.Digest{o.TreeDigest, o.RootDirectoryDigest} {
			if p == nil {
				continue
			}
			d, err := cas.FromProto(f, p)
			if err != nil {
				return nil, nil, err
			}
			ds = append(ds, d)
		}
	}
	missing, err = s.Missing(ctx, ds)
	return ds, missing, err
}

func entryJSON(out io.Writer, action cas.Digest, instance string, r *repb.ActionResult, ds, missing []cas.Digest) error {
	b, err := protojson.Marshal(r)
	if err != nil {
		return fmt.Errorf("result of action %s: %w", action, err)
	}
	absent := []string{}
	for _, d := range missing {
		absent = append(absent, d.String())
	}
	return printJSON(out, struct {
		Action   string          `json:"action"`
		Instance string          `json:"instance"`
		Result   json.RawMessage `json:"result"`
		Blobs    int             `json:"blobs"`
		Absent   []string        `json:"absent"`
	}{action.String(), instance, b, len(ds), absent})
}

func cacheRmCommand() *cobra.Command {
	var store reach
	var instance string
	cmd := &cobra.Command{
		Use:   "rm ACTION... [--dir DIR] [--instance NAME]",
		Short: "Removes results from the action cache, so that their actions run again",
		Long: `Rm removes the results of actions from the store of a serve on this machine, while it runs and while it does
not. Blobs stay. The Remote Execution API has no call that removes anything, so that no result of a server elsewhere
can be removed from here: log in there. A result that an upstream of serve (--cas, --store) has as well comes back from it.

It exits with 4 if a result was not there.`,
		Example: `  cloister cache rm 9f2c...e1/142
  cloister cache rm 9f2c...e1/142 --dir /var/cache/cloister --instance main`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ds, err := parseDigests(args)
			if err != nil {
				return err
			}
			if err := cas.CheckInstanceName(instance); err != nil {
				return fmt.Errorf("--instance: %w", err)
			}
			return cacheRm(cmd.Context(), &store, instance, ds, cmd.OutOrStdout())
		},
	}
	store.register(cmd)
	cmd.Flags().StringVar(&instance, "instance", "", "name of the instance")
	return cmd
}

func cacheRm(ctx context.Context, store *reach, instance string, actions []cas.Digest, out io.Writer) error {
	if err := store.open(ctx); err != nil {
		return err
	}
	defer store.Close()
	rows, absent := []removed{}, false
	for _, d := range actions {
		was, err := store.Forget(ctx, instance, d)
		if err != nil {
			return newExit(exitEnvironment, fmt.Errorf("remove the result of action %s: %w", d, err))
		}
		rows, absent = append(rows, removed{d.String(), was}), absent || !was
		if store.json {
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
	if store.json {
		if err := printJSON(out, rows); err != nil {
			return err
		}
	}
	if absent {
		return newExit(exitAbsent, nil)
	}
	return nil
}

// A removed is what rm prints of an action.
type removed struct {
	Action   string `json:"action"`
	Recorded bool   `json:"recorded"` // there was a result
}
