// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// lsConfig is what the flags of action ls say.
type lsConfig struct {
	from                        origin
	invocation, mnemonic, stage string
	target                      string
	failed, json, all           bool
	most                        int
}

func actionLsCommand() *cobra.Command {
	var c lsConfig
	cmd := &cobra.Command{
		Use:   "ls [--target LABEL] [--mnemonic NAME] [--invocation ID] [--stage STAGE] [--failed] [--all] [-n N] [--cas URL] [--instance NAME] [--json]",
		Short: "Lists what a server executes and has executed",
		Long: `Ls prints the executions that a server knows, the newest first: those that wait, those that run, and those that
have ended, for as long as the server keeps them (serve: five minutes, and the last 10,000). It is what
google.longrunning.Operations lists, and works with every server that serves that.

With --all, --target, --mnemonic, --invocation or --failed it goes on with the history of a server that keeps one, which
outlives that and a restart (serve: --history-size), and has besides what clients looked up in the action cache
themselves: found or absent. Of what has ended it lists that alone then. --stage wants executions.

Each line says how far the execution has come or how it ended, how long it ran, what it was for, its action, by which
cloister action show and cloister run --action find it, and the name by which cloister action log -f follows it, or in
the history the time of the answer. A text that ends in an asterisk stands for all that begin so.

It exits with 1 if the server does not list executions, and with 5 if it cannot be reached.`,
		Example: `  cloister action ls
  cloister action ls --failed -n 10
  cloister action ls --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f --mnemonic CppCompile
  cloister action ls --stage EXECUTING --target '//server/*' --cas grpc://build.example.com:8980`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.most < 1 {
				return fmt.Errorf("-n %d: write a positive number", c.most)
			}
			if _, known := repb.ExecutionStage_Value_value[c.stage]; c.stage != "" && !known {
				return fmt.Errorf("--stage %q: there are QUEUED, EXECUTING, COMPLETED and CACHE_CHECK", c.stage)
			}
			ctx, end := stop(cmd.Context())
			defer end()
			return c.from.explain(c.list(ctx, cmd.OutOrStdout()), exitNo)
		},
	}
	c.from.register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.target, "target", "", "only executions for this target")
	f.StringVar(&c.mnemonic, "mnemonic", "", "only actions of this kind")
	f.StringVar(&c.invocation, "invocation", "", "only executions of this build")
	f.StringVar(&c.stage, "stage", "", "only those in this stage: QUEUED, EXECUTING, COMPLETED, CACHE_CHECK")
	f.BoolVar(&c.all, "all", false, "everything that the server remembers")
	f.BoolVar(&c.failed, "failed", false, "only those that ended otherwise than with exit code 0")
	f.IntVarP(&c.most, "number", "n", 100, "how many to print at most")
	f.BoolVar(&c.json, "json", false, "print one JSON list")
	return cmd
}

// request returns what asks for the first page, with a filter as serve reads it. What has failed no filter says: few of
// many may have, so that pages are large then, however few are wanted.
func (c *lsConfig) request(instance string) *longrunningpb.ListOperationsRequest {
	const most = 1000
	size, stage := min(c.most, most), c.stage
	if c.failed {
		size = most
		if stage == "" {
			stage = repb.ExecutionStage_COMPLETED.String()
		}
	}
	var terms []string
	for _, t := range []struct{ key, value string }{
		{"target", c.target}, {"mnemonic", c.mnemonic}, {"invocation", c.invocation}, {"stage", stage},
	} {
		if t.value != "" {
			terms = append(terms, t.key+"="+strconv.Quote(t.value))
		}
	}
	return &longrunningpb.ListOperationsRequest{Name: instance, Filter: strings.Join(terms, " "), PageSize: int32(size)}
}

// list prints executions, and what the server's history has, if it is wanted and kept.
func (c *lsConfig) list(ctx context.Context, out io.Writer) error {
	rows := []execution{}
	show := func(row execution) (bool, error) {
		if len(rows) == c.most {
			return false, nil
		}
		rows = append(rows, row)
		if c.json {
			return true, nil
		}
		_, err := fmt.Fprintln(out, row.line())
		return true, err
	}
	wanted := selection{invocation: c.invocation, target: c.target, mnemonic: c.mnemonic, failed: c.failed, all: c.all}
	err := errNoHistory
	if wanted.any() && c.stage == "" {
		err = c.remembered(ctx, wanted, show)
	}
	if errors.Is(err, errNoHistory) {
		err = c.executions(ctx, show)
	}
	if err == nil && c.json {
		err = printJSON(out, rows)
	}
	return err
}

// remembered shows what has not ended, if that is wanted, and then the history.
func (c *lsConfig) remembered(ctx context.Context, wanted selection, show func(execution) (bool, error)) error {
	var rows []execution
	if !c.failed {
		err := c.executions(ctx, func(row execution) (bool, error) {
			if row.Status == "" {
				rows = append(rows, row)
			}
			return len(rows) < c.most, nil
		})
		// Who may read only, and a server that has a history alone, says no to that.
		if e, no := errors.AsType[*exit](err); err != nil && !(no && e.code == exitNo) {
			return err
		}
	}
	err := c.from.recall(ctx, wanted.request(c.most), func(e *cloisterpb.HistoryEntry) error {
		rows = append(rows, remembered(e))
		return nil
	})
	if err != nil {
		return err
	}
	for _, row := range rows {
		if more, err := show(row); err != nil || !more {
			return err
		}
	}
	return nil
}

// remembered reads an entry of a history.
func remembered(e *cloisterpb.HistoryEntry) execution {
	row := execution{
		Action: e.Action, Stage: repb.ExecutionStage_COMPLETED.String(), Status: codes.Code(e.Code).String(), How: e.How, Cached: e.How == "cached",
		Worker: e.Worker, Ran: e.Ran.AsDuration().Seconds(), Target: e.TargetId, Mnemonic: e.ActionMnemonic, Invocation: e.InvocationId,
		Time: e.Time.AsTime().UTC().Format(time.RFC3339), Verdict: e.Verdict, Manifest: e.Manifest, StableHash: e.StableHash,
	}
	if e.Result != "" {
		row.ExitCode = &e.ExitCode
	}
	return row
}

// executions shows operations, page by page, until show wants no more.
func (c *lsConfig) executions(ctx context.Context, show func(execution) (bool, error)) error {
	conn, instance, err := c.from.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	l := &logs{logConfig: &logConfig{from: c.from}, conn: conn, instance: instance}
	operations := longrunningpb.NewOperationsClient(conn)
	req := c.request(instance)
	for {
		page, err := operations.ListOperations(ctx, req)
		switch {
		case status.Code(err) == codes.Unimplemented:
			return newExit(exitNo, fmt.Errorf("the server at %s lists no executions: it does not serve google.longrunning.Operations", c.from.cas))
		case err != nil:
			return l.explain("list executions", err)
		}
		for _, op := range page.Operations {
			row, err := executionOf(op)
			if err != nil {
				return newExit(exitNo, fmt.Errorf("operation %s: %w", quote(op.Name), err))
			}
			if c.failed && !row.failed() {
				continue
			}
			if more, err := show(row); err != nil || !more {
				return err
			}
		}
		if req.PageToken = page.NextPageToken; req.PageToken == "" {
			return nil
		}
	}
}

// An execution is what ls prints of an operation.
type execution struct {
	Operation  string  `json:"operation,omitempty"`
	Action     string  `json:"action"`
	Stage      string  `json:"stage"`
	Status     string  `json:"status,omitempty"` // of one that has ended: OK, or the code of its failure
	ExitCode   *int32  `json:"exit_code,omitempty"`
	Cached     bool    `json:"cached,omitempty"`
	Worker     string  `json:"worker,omitempty"`
	Queued     string  `json:"queued,omitempty"`
	Ran        float64 `json:"ran_seconds,omitempty"`
	Target     string  `json:"target,omitempty"`
	Mnemonic   string  `json:"mnemonic,omitempty"`
	Invocation string  `json:"invocation,omitempty"`
	Message    string  `json:"message,omitempty"`

	// Of a history alone.
	How        string `json:"how,omitempty"`  // executed, cached, found, absent, uploaded, checked
	Time       string `json:"time,omitempty"` // of the answer
	Verdict    string `json:"verdict,omitempty"`
	Manifest   string `json:"manifest,omitempty"`
	StableHash string `json:"stable_hash,omitempty"`
}

// executionOf reads an operation, which may be of any server.
func executionOf(op *longrunningpb.Operation) (execution, error) {
	var m repb.ExecuteOperationMetadata
	if err := op.GetMetadata().UnmarshalTo(&m); err != nil {
		return execution{}, errors.New("its metadata is no ExecuteOperationMetadata")
	}
	function, err := new(cas.Instance).FunctionOf(m.DigestFunction, m.ActionDigest)
	if err != nil {
		return execution{}, err
	}
	action, err := cas.FromProto(function, m.ActionDigest)
	if err != nil {
		return execution{}, err
	}
	e := execution{Operation: op.Name, Stage: m.Stage.String(), Action: action.String()}
	e.times(m.PartialExecutionMetadata)
	for _, aux := range m.PartialExecutionMetadata.GetAuxiliaryMetadata() {
		var who repb.RequestMetadata
		if aux.UnmarshalTo(&who) == nil {
			e.Target, e.Mnemonic, e.Invocation = who.TargetId, who.ActionMnemonic, who.ToolInvocationId
		}
	}
	if !op.Done {
		return e, nil
	}
	var r repb.ExecuteResponse
	switch {
	case op.GetError() != nil:
		e.Status, e.Message = codes.Code(op.GetError().Code).String(), op.GetError().Message
	case op.GetResponse().UnmarshalTo(&r) != nil:
		return execution{}, errors.New("its response is no ExecuteResponse")
	default:
		e.Status, e.Message, e.Cached = codes.Code(r.GetStatus().GetCode()).String(), r.Message, r.CachedResult
		if r.Result != nil {
			e.ExitCode = &r.Result.ExitCode
			e.times(r.Result.ExecutionMetadata)
		}
	}
	return e, nil
}

// times reads who executed it and when.
func (e *execution) times(m *repb.ExecutedActionMetadata) {
	if m == nil {
		return
	}
	if m.Worker != "" {
		e.Worker = m.Worker
	}
	if m.QueuedTimestamp != nil {
		e.Queued = m.QueuedTimestamp.AsTime().UTC().Format(time.RFC3339Nano)
	}
	e.Ran = between(m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp).Seconds()
}

// between returns the time from one moment to another, 0 if one is not known.
func between(from, to *timestamppb.Timestamp) time.Duration {
	if from == nil || to == nil {
		return 0
	}
	return max(to.AsTime().Sub(from.AsTime()), 0)
}

// failed reports whether it has ended otherwise than well.
func (e *execution) failed() bool {
	return e.Status != "" && (e.Status != codes.OK.String() || e.ExitCode != nil && *e.ExitCode != 0)
}

// line returns e for a person. What a client chose is quoted.
func (e *execution) line() string {
	state := strings.ToLower(e.Stage)
	switch {
	case e.Status == "":
	case e.Verdict != "":
		state = quote(e.Verdict)
	case e.Status != codes.OK.String():
		state = e.Status
	case e.How == "absent":
		state = "absent"
	case e.ExitCode != nil:
		state = fmt.Sprintf("exit %d", *e.ExitCode)
	}
	ran := "-"
	switch {
	case e.Cached, e.How == "found", e.How == "uploaded", e.How == "checked":
		ran = quote(cmp.Or(e.How, "cached"))
	case e.Ran > 0:
		ran = time.Duration(e.Ran * float64(time.Second)).Round(time.Millisecond).String()
	}
	what := "-"
	if text := strings.TrimSpace(e.Mnemonic + " " + e.Target); text != "" {
		what = quote(text)
	}
	return fmt.Sprintf("%-18s %10s  %-40s %s  %s", state, ran, what, quote(e.Action), quote(cmp.Or(e.Operation, e.Time)))
}
