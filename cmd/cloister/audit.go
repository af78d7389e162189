// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/auditlog"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
)

// auditConfig is the flags of audit and of its subcommands.
type auditConfig struct {
	from         client.Server
	remote       bool   // the log is that of the server
	dir          string // of the store
	action, kind string
	since        time.Duration
	limit        int
	json         bool
	head         string
}

func auditCommand() *cobra.Command {
	var c auditConfig
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Show and verify the audit log",
		Long: `Audit reads the log in the directory "audit" of a store: what actions attempted and were refused, which exceptions they
used, which limits they hit, and which actions the policy refused. The log is append-only, and each line holds the hash
of the previous one.

With --server and without --dir it copies the log of that server and verifies the copy. Servers offer this only with
--auth, to callers with the right operate.`,
		Example: `  cloister audit ls --since 1h                 # what was tried in the last hour
  cloister audit show 9f2c1e77                 # everything about one action
  cloister audit verify                        # has anybody changed the log?`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	for _, sub := range []*cobra.Command{auditLsCommand(&c), auditShowCommand(&c), auditVerifyCommand(&c)} {
		sub.Flags().StringVar(&c.dir, "dir", "", "directory of a local store (default, unless a server is named: cloister in the user's cache directory)")
		c.from.RegisterAddress(sub)
		sub.PreRun = func(cmd *cobra.Command, _ []string) { c.remote = c.dir == "" && c.from.Named(cmd) }
		cmd.AddCommand(sub)
	}
	return cmd
}

func auditLsCommand(c *auditConfig) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List audit events",
		Long: `Ls prints one line per event, oldest first: time (UTC), a prefix of the action's digest, kind and text. The kind "more"
counts events of a run that were not recorded, and "note" is about the log itself. A summary with the head of the log,
for audit verify --head, goes to stderr.

With --json it prints the complete entries that contain such events, one per line.`,
		Example: `  cloister audit ls --since 1h
  cloister audit ls --kind connect --limit 20
  cloister audit ls --action 9f2c1e77 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.limit < 0 || c.since < 0 {
				return errors.New("--limit and --since: write a number from 0")
			}
			if c.kind != "" && !slices.Contains(auditlog.Kinds, c.kind) {
				return fmt.Errorf("--kind %q: write one of %s", c.kind, strings.Join(auditlog.Kinds, ", "))
			}
			return auditLs(cmd.Context(), c, time.Now(), cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr()))
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.action, "action", "", "only actions whose digest has this prefix")
	f.StringVar(&c.kind, "kind", "", "only events of this kind: "+strings.Join(auditlog.Kinds, ", "))
	f.DurationVar(&c.since, "since", 0, "only events younger than this (default: all)")
	f.IntVar(&c.limit, "limit", 0, "maximum number of lines, from the end (default: all)")
	render.JSONFlag(f, &c.json, "print whole entries as JSON", auditlog.Line{})
	return cmd
}

func auditShowCommand(c *auditConfig) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show SEQ|ACTION",
		Short: "Show audit entries in full",
		Long: `Show prints every field and event of the entry with this number, or else of all entries of actions whose digest has
this prefix. The exit code is 1 if there is none.`,
		Example: `  cloister audit show 17
  cloister audit show 9f2c1e77`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" {
				return errors.New("empty argument: write the number of an entry, or a prefix of an action's digest")
			}
			return auditShow(cmd.Context(), c, args[0], cmd.OutOrStdout())
		},
	}
	render.JSONFlag(cmd.Flags(), &c.json, "print a JSON list", []auditlog.Line{})
	return cmd
}

func auditVerifyCommand(c *auditConfig) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check the audit log for tampering",
		Long: `Verify reads the whole log and checks the hash chain. It prints the number of entries and the head, the hash of the last
line, and how the log begins if older entries were deleted (serve: --audit-size). The exit code is 1 if a line does not
match; verify names the first.

Only a head kept elsewhere reveals that the end was cut off or that the whole log was rewritten: pass it with --head.`,
		Example: `  cloister audit verify
  cloister audit verify --head "$(cat /elsewhere/head)"`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.head != "" && !headText.MatchString(c.head) {
				return fmt.Errorf("--head %q: write the 64 hexadecimal digits that audit verify or audit ls printed", c.head)
			}
			return auditVerify(cmd.Context(), c, cmd.OutOrStdout())
		},
	}
	render.JSONFlag(cmd.Flags(), &c.json, "print a JSON object", auditState{})
	cmd.Flags().StringVar(&c.head, "head", "", "hash of a line that must be present, from an earlier verify or ls")
	return cmd
}

// headText matches a head.
var headText = regexp.MustCompile(`^[0-9a-f]{64}$`)

// withLog calls f with the directory of the audit log, or of a copy of the server's log. The copy omits files whose
// entries are all older than since.
func (c *auditConfig) withLog(ctx context.Context, since time.Time, f func(dir string) error) error {
	if !c.remote {
		dir, err := storedir.Path(c.dir)
		if err != nil {
			return err
		}
		return f(storedir.Audit(dir))
	}
	ctx, end := interrupt.Context(ctx)
	defer end()
	dir, err := os.MkdirTemp("", "cloister-audit-")
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	defer os.RemoveAll(dir)
	conn, _, err := c.from.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := auditlog.Download(ctx, conn, since, dir); err != nil {
		if _, call := status.FromError(err); call {
			err = c.from.ExplainCall(err)
		}
		return interrupt.Explain(ctx, err, "stopped")
	}
	err = f(dir)
	if e, ok := errors.AsType[*exit.Error](err); ok { // the copy is gone
		return exit.New(e.Code, errors.New(strings.ReplaceAll(e.Error(), dir, strings.TrimRight(c.from.Address, "/")+"/audit")))
	}
	return err
}

// place says in messages where the log is.
func (c *auditConfig) place(dir string) string {
	if c.remote {
		return "of " + c.from.Address
	}
	return "in " + dir
}

// auditError adds the exit code to an error of package audit.
func auditError(dir string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, audit.ErrTampered):
		return exit.New(exit.No, err)
	case errors.Is(err, os.ErrNotExist):
		return exit.New(exit.Environment, fmt.Errorf("no audit log in %s: pass the directory of serve with --dir", dir))
	}
	return exit.New(exit.Environment, err)
}

// auditLs prints the lines that c selects, and then the head of the log to info.
func auditLs(ctx context.Context, c *auditConfig, now time.Time, out, info io.Writer) error {
	var since time.Time
	if c.since > 0 {
		since = now.Add(-c.since)
	}
	return c.withLog(ctx, since, func(dir string) error { return c.list(dir, now, out, info) })
}

func (c *auditConfig) list(dir string, now time.Time, out, info io.Writer) error {
	var kept []string // the last lines, with --limit
	var entries, shown int
	head := ""
	err := audit.Read(dir, func(r audit.Record) error {
		entries, head = entries+1, r.Hash
		if !strings.HasPrefix(r.Action, c.action) || c.since > 0 && now.Sub(r.Time) > c.since {
			return nil
		}
		lines := r.Lines(sandbox.EventKind(c.kind))
		if c.json && len(lines) > 0 {
			lines = []string{r.JSON()}
		}
		if c.limit > 0 {
			kept = append(kept, lines...)
			kept = kept[max(0, len(kept)-c.limit):]
			shown = len(kept)
			return nil
		}
		shown += len(lines)
		return printLines(out, lines)
	})
	if err := errors.Join(printLines(out, kept), auditError(dir, err)); err != nil {
		return err
	}
	if entries == 0 {
		_, err = fmt.Fprintln(info, "the log has no entries")
	} else {
		_, err = fmt.Fprintf(info, "%s of %s, head %s\n", render.Count(shown, "line"), render.Count(entries, "entry"), head)
	}
	return err
}

func printLines(out io.Writer, lines []string) error {
	for _, l := range lines {
		if _, err := fmt.Fprintln(out, l); err != nil {
			return exit.New(exit.Environment, err)
		}
	}
	return nil
}

// auditShow prints the entry with the number name, or else the entries of actions with the prefix name.
func auditShow(ctx context.Context, c *auditConfig, name string, out io.Writer) error {
	return c.withLog(ctx, time.Time{}, func(dir string) error { return c.show(dir, name, out) })
}

func (c *auditConfig) show(dir, name string, out io.Writer) error {
	var numbered, named []string
	shown := (*audit.Record).Text
	if c.json {
		shown = (*audit.Record).JSON
	}
	err := audit.Read(dir, func(r audit.Record) error {
		if strconv.FormatUint(r.Seq, 10) == name {
			numbered = append(numbered, shown(&r))
		} else if strings.HasPrefix(r.Action, name) {
			named = append(named, shown(&r))
		}
		return nil
	})
	if err != nil {
		return auditError(dir, err)
	}
	if len(numbered) > 0 {
		named = numbered
	}
	if len(named) == 0 {
		return exit.New(exit.No, fmt.Errorf("the audit log %s has no entry with number or action prefix %q; see cloister audit ls", c.place(dir), name))
	}
	if c.json {
		return printEntries(out, named)
	}
	_, err = fmt.Fprint(out, strings.Join(named, "\n"))
	return err
}

// printEntries prints lines of the log as a JSON list.
func printEntries(out io.Writer, stored []string) error {
	lines := make([]json.RawMessage, len(stored))
	for i, s := range stored {
		lines[i] = json.RawMessage(s)
	}
	return render.JSON(out, lines)
}

// An auditState is the JSON form of a verified log.
type auditState struct {
	Entries uint64    `json:"entries"`
	Head    string    `json:"head"`              // hash of the last line; 64 zeros for an empty log
	First   uint64    `json:"first"`             // number of the first entry; 0 for an empty log
	Begins  time.Time `json:"begins,omitzero"`   // time of the first entry
	Deleted string    `json:"deleted,omitempty"` // why the log begins after entry 1
	// Unfinished is the size of an incomplete line at the end.
	Unfinished int64 `json:"unfinished_bytes"`
}

// auditVerify prints what a verified log holds.
func auditVerify(ctx context.Context, c *auditConfig, out io.Writer) error {
	return c.withLog(ctx, time.Time{}, func(dir string) error { return c.verify(dir, out) })
}

func (c *auditConfig) verify(dir string, out io.Writer) error {
	report, err := audit.Verify(dir, c.head)
	if err != nil {
		return auditError(dir, err)
	}
	if c.json {
		s := auditState{
			Entries: report.Entries, Head: report.Head, First: report.First, Begins: report.Begins, Unfinished: report.Unfinished,
		}
		if report.First > 1 {
			s.Deleted = whyItBegins(report)
		}
		return render.JSON(out, s)
	}
	fmt.Fprintf(out, "%s, head %s\n", render.Count(report.Entries, "entry"), report.Head)
	if report.First > 1 {
		fmt.Fprintf(out, "begins at entry %d, of %s: %s\n", report.First, report.Begins.Format(time.RFC3339), whyItBegins(report))
	}
	if report.Unfinished > 0 {
		fmt.Fprintf(out, "ends in %d bytes of an incomplete line, which is being written or belongs to a killed writer\n", report.Unfinished)
	}
	return nil
}

// whyItBegins explains why the log begins after entry 1.
func whyItBegins(r *audit.Report) string {
	if r.Dropped == nil {
		return "older entries were deleted, and not by the log itself, which has no entry about it"
	}
	d := r.Dropped.Dropped
	source := fmt.Sprintf("entry %d of %s says", r.Dropped.Seq, r.Dropped.Time.Format(time.RFC3339))
	if !r.Announced() {
		return fmt.Sprintf("older entries were deleted, and not by the log itself, which deleted those up to %d, as %s", d.Last, source)
	}
	last := fmt.Sprintf("%d to %d", d.First, d.Last)
	if !d.Since.IsZero() {
		last += ", since " + d.Since.Format(time.RFC3339)
	}
	return fmt.Sprintf("older entries were deleted for --audit-size, the last of them (%s) as %s", last, source)
}
