// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
)

func cacheShowCommand() *cobra.Command {
	var from client.Server
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ACTION [--server URL] [--instance NAME] [--json]",
		Short: "Show the cached result of an action",
		Long: `Show prints the result of an action in the action cache of a server: exit code, outputs, who made it and when, and how
many of the blobs that it refers to are present. ACTION is the digest of an Action, HASH/SIZE, as messages and logs print
it, or as in cloister action show; the Action itself can be absent.

The exit code is 4 if no usable result is recorded, and 5 if the server cannot be reached.`,
		Example: `  cloister cache show 9f2c...e1/142
  cloister cache show 9f2c...e1/142 --server grpc://cache.example.com:9092 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			named, err := from.Action(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			action := named.Digest
			return client.WithStore(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				r, err := s.Lookup(ctx, action)
				if err != nil {
					return err
				}
				ds, missing, err := actions.References(ctx, s, action.Function(), r)
				if err != nil {
					return err
				}
				if asJSON {
					return entryJSON(cmd.OutOrStdout(), action, s.Name(), r, ds, missing)
				}
				p := &render.Page{W: cmd.OutOrStdout()}
				p.Line("action", action.String())
				if s.Name() != "" {
					p.Line("instance", render.Quote(s.Name()))
				}
				p.Result(r)
				p.Line("refers to", fmt.Sprintf("%s, %d of them absent", render.Count(len(ds), "blob"), len(missing)))
				for _, d := range missing {
					p.Line("absent", d.String())
				}
				return p.Err
			})
		},
	}
	from.Register(cmd)
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object with the result as a message of the API", cachedResult{})
	from.Complete(cmd)
	return cmd
}

// A cachedResult is the JSON form of a result in the action cache.
type cachedResult struct {
	Action   string          `json:"action"`
	Instance string          `json:"instance"`
	Result   json.RawMessage `json:"result"` // an ActionResult
	Blobs    int             `json:"blobs"`  // that the result refers to
	Absent   []string        `json:"absent"` // the digests of those that are absent
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
	return render.JSON(out, cachedResult{action.String(), instance, b, len(ds), absent})
}
