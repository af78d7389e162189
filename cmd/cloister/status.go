// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/operator"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
)

func statusCommand() *cobra.Command {
	var from operator.Fleet
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status [--server URL] [--json]",
		Short: "Show the status of a server, its queue and its workers",
		Long: `Status prints whether a cloister serve is ready and why not, what waits and which workers could take it, and for each
worker its state, its busy slots and their actions. Workers that left are shown while the server expects them back.

The exit code is 1 if the server is not ready, and 5 if it cannot be reached.`,
		Example: `  cloister status
  cloister status --server grpcs://build.example.com:8980 --json | jq '.workers[] | select(.state == "drained") | .name'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			return from.Connect(func(c cloisterpb.FleetClient) error {
				s, err := from.Status(ctx, c)
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				if asJSON {
					err = render.JSON(out, s)
				} else {
					for _, line := range s.Lines() {
						if _, err = fmt.Fprintln(out, line); err != nil {
							break
						}
					}
				}
				if err == nil && !s.Ready {
					err = exit.New(exit.No, nil)
				}
				return err
			})
		},
	}
	from.Register(cmd)
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", &operator.State{})
	return cmd
}
