// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/spf13/cobra"
)

// An explanation explains a code that messages, logs and reports contain. docs/codes.md has the table.
type explanation struct {
	Code string `json:"code"`
	// Kind is "event", of the audit log, console and gate; "cause", of a difference between runs; or "exit code".
	Kind    string `json:"kind"`
	Meaning string `json:"meaning"`
	Remedy  string `json:"remedy"`
}

// explanations returns all explanations. Those of causes are the rows of docs/causes.md.
func explanations() []explanation {
	const event, code = "event", "exit code"
	all := []explanation{
		{
			string(sandbox.EventConnect), event,
			"a run tried to reach another host, or to look up its name, and was refused",
			"add what it needs to the inputs, or allow the endpoint in the policy, with run --allow, or in the gate",
		},
		{
			string(sandbox.EventAllowed), event,
			"a run connected to an allowed endpoint; its result is not cached unless the policy permits that",
			"none needed; remove the endpoint from the policy to forbid it",
		},
		{
			string(sandbox.EventUnreachable), event,
			"a permitted connection failed: an allowed endpoint did not answer, or nothing listens on the loopback",
			"start the listener before its clients, or check the endpoint from the worker's machine",
		},
		{
			string(sandbox.EventWrite), event,
			"a run tried to change an input, or to write outside its writable directories",
			"copy the input before changing it, and write to declared outputs or $TMPDIR",
		},
		{
			string(sandbox.EventExec), event,
			"a run tried to execute a program that the sandbox does not contain",
			"add the program to the inputs, install it on every worker below /usr, or use a container image that has it",
		},
		{
			string(sandbox.EventSyscall), event,
			"the filter refused a system call that builds do not need",
			"avoid the operation that needs it; cloister action show names the process",
		},
		{
			string(sandbox.EventRead), event,
			"a run looked for a file that is in the source tree but is not an input",
			"add the file to srcs, hdrs or data of the target",
		},
		{
			string(sandbox.EventOutput), event,
			"a run left a file that is neither an input nor a declared output; it was discarded",
			"declare the file as an output, or write it to $TMPDIR",
		},
		{
			string(sandbox.EventLimit), event,
			"a run reached a limit of memory, time, processes or files",
			"use less, or request more with the property cloister-LIMIT up to the policy's maximum",
		},
		{
			string(sandbox.EventRefused), event,
			"the policy did not grant a property of the action, so the action did not run",
			"ask cloister policy explain what the rule grants, and change the property or the policy",
		},
		{
			"0", code,
			"the command succeeded, or the answer is yes",
			"none needed",
		},
		{
			"1", code,
			"the answer is no: something differs, failed or is refused",
			"read the output, which has the findings",
		},
		{
			"2", code,
			"the command line, the environment or a file is invalid; of repro and diff: the runs could not be compared",
			"correct what the message names; --help has examples",
		},
		{
			"3", code,
			"this machine cannot do it: a kernel feature, a permission or a directory is missing",
			"cloister check lists what is missing, with the command that enables it",
		},
		{
			"4", code,
			"the server lacks a blob, a result or an action; of gate: a step violated the policy",
			"build again to upload what was evicted, or check --instance and --server",
		},
		{
			"5", code,
			"the server cannot be reached",
			"check --server, and the server with cloister status",
		},
		{
			"6", code,
			"a time limit of the command line has passed",
			"raise --timeout, or look at cloister status for what still runs",
		},
		{
			"125", code,
			"cloister run itself failed, not its command",
			"read the message; cloister check shows whether this machine can run actions",
		},
	}
	for _, row := range compare.Causes {
		all = append(all, explanation{string(row.Cause), "cause", row.Meaning, compare.FixFor(row.Cause, "")})
	}
	return all
}

func explainCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain [CODE] [--json]",
		Short: "Explain an event, a cause or an exit code",
		Long: `Explain prints what a code in a message, log or report means, and what to do: the kind of an event (connect), the cause
of a difference between runs (member order), or the exit code of a command. Without an argument it lists all codes. It
contacts no server; docs/codes.md has the same table. The exit code is 4 if the code is unknown.`,
		Example: `  cloister explain
  cloister explain connect
  cloister explain member order`,
		RunE: func(cmd *cobra.Command, args []string) error {
			code := strings.Join(args, " ")
			found := []explanation{}
			for _, e := range explanations() {
				if code == "" || strings.EqualFold(e.Code, code) {
					found = append(found, e)
				}
			}
			out := cmd.OutOrStdout()
			switch {
			case len(found) == 0:
				return exit.New(exit.Absent, fmt.Errorf("unknown code %+.80q; cloister explain lists the codes", code))
			case asJSON:
				return render.JSON(out, found)
			case code == "":
				w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				for _, e := range found {
					fmt.Fprintf(w, "%s\t%s\t%s\n", e.Code, e.Kind, e.Meaning)
				}
				return w.Flush()
			}
			p := &render.Page{W: out}
			for _, e := range found {
				p.Line(e.Kind, e.Code)
				p.Line("meaning", e.Meaning)
				p.Line("remedy", e.Remedy)
			}
			return p.Err
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []explanation{})
	return cmd
}
