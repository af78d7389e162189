// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/server"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/spf13/cobra"
)

func actionVerdictsCommand() *cobra.Command {
	var dir string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verdicts [--dir DIR] [--json]",
		Short: "List the actions that a server found irreproducible",
		Long: `Verdicts prints one line for each action that serve --repro-sample or --repro-gate found not to be reproducible, the
latest first: action, verdict, time since the last check, time until the verdict expires, target, and causes. It reads
the directory of a server on this machine, which may be running. cloister repro ACTION shows more.

A server with --repro-gate ignores the expiry: it checks such an action each time until it comes out the same.`,
		Example: `  cloister action verdicts
  cloister action verdicts --dir /var/cache/cloister --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := storedir.Path(dir)
			if err != nil {
				return err
			}
			all, err := repro.ReadVerdicts(path)
			if err == nil && len(all) == 0 && !asJSON {
				_, err = fmt.Fprintf(unlessQuiet(cmd, cmd.ErrOrStderr()), "no verdicts in %s\n", path)
			} else if err == nil {
				err = printVerdicts(cmd.OutOrStdout(), all, time.Now(), asJSON)
			}
			if err != nil {
				return exit.New(exit.Environment, err)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "directory of the server's store (default: cloister in the user's cache directory)")
	render.JSONFlag(f, &asJSON, "print a JSON list", []verdictRow{})
	return cmd
}

// A verdictRow is the JSON form of a verdict in a list. Those of earlier versions have no result, target and causes.
type verdictRow struct {
	Action   string    `json:"action"`
	Instance string    `json:"instance"`
	Target   string    `json:"target"`
	Mnemonic string    `json:"mnemonic"`
	Result   string    `json:"result"`
	Causes   []string  `json:"causes"`
	Line     string    `json:"line"`
	Checked  time.Time `json:"checked"`
	Expires  time.Time `json:"expires"`
}

func printVerdicts(out io.Writer, all []*repro.Summary, now time.Time, asJSON bool) error {
	rows := []verdictRow{}
	for _, v := range all {
		rows = append(rows, verdictRow{
			v.Action.String(), v.Instance, v.Target, v.Mnemonic, string(v.Result), append([]string{}, v.Causes...), v.Line,
			v.Time.UTC(), v.Time.UTC().Add(server.VerdictAge),
		})
	}
	if asJSON {
		return render.JSON(out, rows)
	}
	if _, err := fmt.Fprintf(out, verdictColumns+"\n", "ACTION", "VERDICT", "AGE", "EXPIRES", "WHAT"); err != nil {
		return err
	}
	for i := range rows {
		if _, err := fmt.Fprintln(out, rows[i].text(now)); err != nil {
			return err
		}
	}
	return nil
}

const verdictColumns = "%-12.12s  %-10s  %8s  %8s  %s"

// text returns r as a line, with everything that a client chose quoted.
func (r *verdictRow) text(now time.Time) string {
	what := strings.Join(r.Causes, ", ")
	if r.Result == "" {
		what = render.Quote(strings.TrimPrefix(r.Line, "not reproducible: "))
	}
	if r.Target != "" {
		what = render.Quote(r.Target) + "  " + what
	}
	expires := "expired"
	if left := r.Expires.Sub(now); left > 0 {
		expires = render.Age(left.Seconds())
	}
	age := render.Age(max(0, now.Sub(r.Checked).Seconds()))
	return strings.TrimSpace(fmt.Sprintf(verdictColumns, r.Action, cmp.Or(r.Result, "-"), age, expires, what))
}
