// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/spf13/cobra"
)

func authCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "auth",
		Short: "Check a callers file and query its rights",
		Long: `A callers file, which serve reads with --auth, lists the callers of a server and their rights. docs/auth.md describes
the format.`,
		Example: `  cloister auth check auth.yaml
  cloister auth check auth.yaml --caller ci --right execute --instance main`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(authCheckCommand())
	return cmd
}

func authCheckCommand() *cobra.Command {
	var caller, right, instance string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check FILE [--caller NAME --right RIGHT [--instance NAME]] [--json]",
		Short: "Check a callers file, or whether a caller has a right",
		Long: `Check reads a callers file and its key files as serve does, and prints the callers with their credentials and rights.
With --caller and --right it prints whether the caller has the right in an instance. It prints warnings about dangerous
settings on standard error.

The exit code is 1 if the caller lacks the right, and 2 if the file has a mistake; the message gives its position.`,
		Example: `  cloister auth check auth.yaml
  cloister auth check auth.yaml --caller ci --right execute --instance main
  cloister auth check auth.yaml --caller worker --right work --instance main`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if (caller == "") != (right == "") {
				return errors.New("--caller and --right go together")
			}
			if cmd.Flags().Changed("instance") && right == "" {
				return errors.New("--instance needs --caller and --right")
			}
			rules, err := access.ReadFile(args[0])
			if err != nil {
				return exit.New(exit.Usage, err)
			}
			for _, w := range rules.Warnings() {
				fmt.Fprintf(cmd.ErrOrStderr(), "cloister: warning: %s\n", w)
			}
			if caller == "" {
				return listCallers(cmd.OutOrStdout(), rules, asJSON)
			}
			return answer(cmd.OutOrStdout(), rules, caller, right, instance, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&caller, "caller", "", "name of the caller to ask about")
	f.StringVar(&right, "right", "", "right to ask about: read, write, cache, execute, work or operate")
	f.StringVar(&instance, "instance", "", "instance name")
	flags.AllowEmpty(f, "instance")
	render.JSONFlag(f, &asJSON, "print a JSON object", callersFile{}, callerMay{})
	return cmd
}

// A callersFile is the JSON form of a callers file.
type callersFile struct {
	Callers  []callerRow `json:"callers"`
	Warnings []string    `json:"warnings"` // about dangerous settings
}

// A callerRow is a caller in JSON.
type callerRow struct {
	Name       string   `json:"name"`
	Credential string   `json:"credential"` // its kind, such as certificate
	Rights     []string `json:"rights"`     // with instances unless they are all, such as "execute in main"
}

// A callerMay is the JSON form of whether a caller has a right.
type callerMay struct {
	May bool   `json:"may"`
	Why string `json:"why"`
}

// listCallers prints a line for each caller, or one JSON object.
func listCallers(out io.Writer, rules *access.Rules, asJSON bool) error {
	if asJSON {
		all := callersFile{Callers: []callerRow{}, Warnings: append([]string{}, rules.Warnings()...)}
		for _, c := range rules.Callers() {
			all.Callers = append(all.Callers, callerRow{c.Name, c.Credential, append([]string{}, c.Rights...)})
		}
		return render.JSON(out, all)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, c := range rules.Callers() {
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.Name, c.Credential, strings.Join(c.Rights, "; "))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, rules)
	return err
}

// answer prints whether a caller has a right.
func answer(out io.Writer, rules *access.Rules, caller, right, instance string, asJSON bool) error {
	yes, why, err := rules.May(caller, right, instance)
	if err != nil {
		return exit.New(exit.Usage, err)
	}
	if asJSON {
		err = render.JSON(out, callerMay{yes, why})
	} else {
		_, err = fmt.Fprintf(out, "%s: %s\n", map[bool]string{true: "yes", false: "no"}[yes], why)
	}
	if err != nil || yes {
		return err
	}
	return exit.New(exit.No, nil)
}
