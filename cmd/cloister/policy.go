// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/spf13/cobra"
)

// exitRefused is the exit code of explain for an action that the policy refuses.
const exitRefused = 1

func policyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Check policies and explain their grants",
		Long: `A policy limits what actions can be granted: resources, sizes and network exceptions. docs/policy.md describes the
format.`,
		Example: `  cloister policy check policy.yaml
  cloister policy explain policy.yaml --mnemonic TestRunner --property cloister-memory=8GiB
  cloister policy explain                      # the built-in policy`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(policyCheckCommand(), policyExplainCommand())
	return cmd
}

func policyCheckCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check FILE [--json]",
		Short: "Parse a policy and print it in full",
		Long: `Check prints profiles with everything that they inherit, and rules in order; built-in values are comments. The exit code
is 2 if the file has a mistake; the message says where.`,
		Example: "  cloister policy check policy.yaml",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := confinement.ReadPolicy("read the policy", args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return render.JSON(cmd.OutOrStdout(), parsedPolicy{p.Hash(), p.Text()})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "# policy %s\n%s", p.Hash(), p.Text())
			return err
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON object", parsedPolicy{})
	return cmd
}

// A parsedPolicy is the JSON form of a policy.
type parsedPolicy struct {
	Hash string `json:"hash"` // as manifests and metrics have it
	Text string `json:"text"` // the policy in full, in YAML
}

func policyExplainCommand() *cobra.Command {
	var r policy.Request
	var properties []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain [FILE] [--property K=V]... [--target LABEL] [--mnemonic NAME] [--instance NAME] [--json]",
		Short: "Explain what a policy grants an action",
		Long: `Explain prints what an action with these properties is granted by a worker that can enforce every limit, with the rule
and line behind each decision, and how much more properties may request. Without a file it explains the built-in policy on
this machine. The exit code is 1 if the policy refuses the action.`,
		Example: `  cloister policy explain
  cloister policy explain policy.yaml --target //third_party/zlib:src --property pool=net --property cloister-network=example.org:443`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p := confinement.DefaultPolicy()
			if len(args) > 0 {
				var err error
				if p, err = confinement.ReadPolicy("read the policy", args[0]); err != nil {
					return err
				}
			}
			for _, kv := range properties {
				k, v, ok := strings.Cut(kv, "=")
				if !ok || k == "" {
					return fmt.Errorf("--property %q: write NAME=VALUE", kv)
				}
				r.Properties = append(r.Properties, policy.Property{Name: k, Value: v})
			}
			return explain(cmd.OutOrStdout(), p, r, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&properties, "property", nil, "platform property of the action, NAME=VALUE; repeatable")
	f.StringVar(&r.Target, "target", "", "label of the action's target")
	f.StringVar(&r.Mnemonic, "mnemonic", "", "mnemonic of the action")
	f.StringVar(&r.Instance, "instance", "", "instance name of the request")
	flags.AllowEmpty(f, "instance")
	render.JSONFlag(f, &asJSON, "print a JSON object", explained{})
	return cmd
}

// An explained is the JSON form of a policy's decision. Without a grant only Refused is set.
type explained struct {
	Granted  bool     `json:"granted"`
	Refused  string   `json:"refused,omitempty"` // why
	Rule     string   `json:"rule,omitempty"`
	Profile  string   `json:"profile,omitempty"`
	Hermetic bool     `json:"hermetic"`
	Cached   bool     `json:"results_recorded"`
	Why      []string `json:"why,omitempty"` // each decision, with its line in the file
}

// explain prints what p grants r.
func explain(out io.Writer, p *policy.Policy, r policy.Request, asJSON bool) error {
	g, err := p.Compile(r, sandbox.AllLimits)
	switch {
	case errors.Is(err, policy.ErrRefused):
		var failed error
		if asJSON {
			failed = render.JSON(out, explained{Refused: err.Error()})
		}
		return exit.New(exitRefused, errors.Join(err, failed))
	case err != nil:
		return err
	case asJSON:
		return render.JSON(out, explained{true, "", g.Rule, g.Profile, g.Hermetic, g.Cache, g.Why})
	}
	_, err = fmt.Fprintf(out, "granted by rule %s: profile %s, hermetic %t, results recorded %t\n  %s\n",
		g.Rule, g.Profile, g.Hermetic, g.Cache, strings.Join(g.Why, "\n  "))
	return err
}
