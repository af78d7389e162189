// SPDX-License-Identifier: Apache-2.0

package actions

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
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// List is the flags of action ls.
type List struct {
	From                        client.Server
	Invocation, Mnemonic, Stage string
	Target                      string
	Failed, JSON, All, Wide     bool
	Limit                       int
	Before                      uint64 // only entries of the history with lower numbers; 0 for all
	Notes                       io.Writer
}

// request returns the request for the first page, with a filter in the syntax of serve. No filter selects failures, and
// few of many actions may have failed, so pages are large with --failed.
func (c *List) request(instance string) *longrunningpb.ListOperationsRequest {
	const most = 1000
	size, stage := min(c.Limit, most), c.Stage
	if c.Failed {
		size = most
		if stage == "" {
			stage = repb.ExecutionStage_COMPLETED.String()
		}
	}
	var terms []string
	for _, t := range []struct{ key, value string }{
		{"target", c.Target}, {"mnemonic", c.Mnemonic}, {"invocation", c.Invocation}, {"stage", stage},
	} {
		if t.value != "" {
			terms = append(terms, t.key+"="+strconv.Quote(t.value))
		}
	}
	return &longrunningpb.ListOperationsRequest{Name: instance, Filter: strings.Join(terms, " "), PageSize: int32(size)}
}

// Run prints executions, and the history if it is requested and kept.
func (c *List) Run(ctx context.Context, out io.Writer) error {
	rows := []Execution{}
	err := c.Each(ctx, func(row Execution) (bool, error) {
		rows = append(rows, row)
		if c.JSON {
			return true, nil
		}
		if len(rows) == 1 {
			if _, err := fmt.Fprintln(out, header(c.Wide)); err != nil {
				return false, err
			}
		}
		if !c.From.AllInstances() {
			row.Instance = "" // the one of the command line
		}
		_, err := fmt.Fprintln(out, row.line(c.Wide, render.Colours(out)))
		return true, err
	})
	switch {
	case err != nil:
	case c.JSON:
		err = render.JSON(out, rows)
	case len(rows) == 0 && c.filter().Set():
		fmt.Fprintln(c.Notes, "nothing matches")
	case len(rows) == 0:
		fmt.Fprintln(c.Notes, "no current executions; --all lists the history")
	}
	return err
}

// filter returns what c selects of a history.
func (c *List) filter() *client.Filter {
	return &client.Filter{Invocation: c.Invocation, Target: c.Target, Mnemonic: c.Mnemonic, Failed: c.Failed, All: c.All}
}

// Each passes executions to show, and the history if it is requested and kept, up to the limit and until show returns
// false.
func (c *List) Each(ctx context.Context, show func(Execution) (bool, error)) (err error) {
	if c.Invocation, err = c.From.Invocation(ctx, c.Invocation); err != nil {
		return err
	}
	left := c.Limit
	limited := func(row Execution) (bool, error) {
		if left--; left < 0 {
			return false, nil
		}
		return show(row)
	}
	wanted := c.filter()
	err = client.ErrNoHistory
	if wanted.Set() && c.Stage == "" {
		err = c.eachOfHistory(ctx, wanted, limited)
	}
	if errors.Is(err, client.ErrNoHistory) {
		err = c.executions(ctx, limited)
	}
	return err
}

// eachOfHistory passes unfinished executions, if requested, and then the history to show.
func (c *List) eachOfHistory(ctx context.Context, wanted *client.Filter, show func(Execution) (bool, error)) error {
	var rows []Execution
	if !c.Failed && c.Before == 0 {
		err := c.executions(ctx, func(row Execution) (bool, error) {
			if row.Status == "" {
				rows = append(rows, row)
			}
			return len(rows) < c.Limit, nil
		})
		// Callers with read access only, and servers with only a history, may not list executions.
		if e, no := errors.AsType[*exit.Error](err); err != nil && !(no && e.Code == exit.No) {
			return err
		}
	}
	req := wanted.Request(c.Limit)
	req.AllInstances, req.Before = c.From.AllInstances(), c.Before
	err := c.From.History(ctx, req, func(e *cloisterpb.HistoryEntry) error {
		rows = append(rows, OfEntry(e))
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

// OfEntry converts an entry of a history.
func OfEntry(e *cloisterpb.HistoryEntry) Execution {
	row := Execution{
		Action: e.Action, Stage: repb.ExecutionStage_COMPLETED.String(), Status: codes.Code(e.Code).String(), How: e.How, Cached: e.How == "cached",
		Worker: e.Worker, Ran: e.Ran.AsDuration().Seconds(), Target: e.TargetId, Mnemonic: e.ActionMnemonic, Invocation: e.InvocationId,
		Time: e.Time.AsTime().UTC().Format(time.RFC3339), Verdict: e.Verdict, Manifest: e.Manifest, StableHash: e.StableHash,
		Caller: e.Caller, Instance: e.InstanceName, Number: e.Number,
	}
	if e.Result != "" {
		row.ExitCode = &e.ExitCode
	}
	return row
}

// executions passes operations to show, page by page, until show returns false.
func (c *List) executions(ctx context.Context, show func(Execution) (bool, error)) error {
	conn, instance, err := c.From.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	l := &logs{Log: &Log{From: c.From}, conn: conn, instance: instance}
	operations := longrunningpb.NewOperationsClient(conn)
	req := c.request(instance)
	all := c.From.AllInstances()
	if all {
		req.Name = "-" // AIP-159
	}
	for {
		page, err := operations.ListOperations(ctx, req)
		switch code := status.Code(err); {
		case all && (code == codes.InvalidArgument || code == codes.NotFound): // a server without lists of all instances
			all, req.Name = false, instance
			continue
		case code == codes.Unimplemented:
			return exit.New(exit.No, fmt.Errorf("the server at %s lists no executions: it does not serve google.longrunning.Operations", c.From.Address))
		case err != nil:
			return l.explain("list executions", err)
		}
		for _, op := range page.Operations {
			row, err := executionOf(op)
			if err != nil {
				return exit.New(exit.No, fmt.Errorf("operation %s: %w", render.Quote(op.Name), err))
			}
			if c.Failed && !row.Failed() {
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

// An Execution is what ls prints of an operation.
type Execution struct {
	Operation  string  `json:"operation,omitempty"`
	Action     string  `json:"action"`
	Stage      string  `json:"stage"`
	Pull       *Pull   `json:"pull,omitempty"`
	Status     string  `json:"status,omitempty"` // when ended: OK, or an error code
	ExitCode   *int32  `json:"exit_code,omitempty"`
	Cached     bool    `json:"cached,omitempty"`
	Worker     string  `json:"worker,omitempty"`
	Queued     string  `json:"queued,omitempty"`
	Ran        float64 `json:"ran_seconds,omitempty"`
	Target     string  `json:"target,omitempty"`
	Mnemonic   string  `json:"mnemonic,omitempty"`
	Invocation string  `json:"invocation,omitempty"`
	Instance   string  `json:"instance,omitempty"`
	Message    string  `json:"message,omitempty"`

	// Only from a history.
	Number     uint64 `json:"-"`
	How        string `json:"how,omitempty"`  // executed, cached, found, absent, uploaded, checked
	Time       string `json:"time,omitempty"` // of the answer
	Caller     string `json:"caller,omitempty"`
	Verdict    string `json:"verdict,omitempty"`
	Manifest   string `json:"manifest,omitempty"`
	StableHash string `json:"stable_hash,omitempty"`
}

// A Pull is the pull of a container image that a queued action waits for.
type Pull struct {
	Image string `json:"image"` // with its digest
	Read  int64  `json:"read_bytes"`
	Total int64  `json:"total_bytes"` // 0: not known yet
}

// executionOf converts an operation of any server.
func executionOf(op *longrunningpb.Operation) (Execution, error) {
	var m repb.ExecuteOperationMetadata
	if err := op.GetMetadata().UnmarshalTo(&m); err != nil {
		return Execution{}, errors.New("metadata is not an ExecuteOperationMetadata")
	}
	function, err := new(cas.Instance).FunctionOf(m.DigestFunction, m.ActionDigest)
	if err != nil {
		return Execution{}, err
	}
	action, err := cas.FromProto(function, m.ActionDigest)
	if err != nil {
		return Execution{}, err
	}
	e := Execution{Operation: op.Name, Stage: m.Stage.String(), Action: action.String()}
	if i := strings.Index(op.Name, "/operations/"); i > 0 {
		e.Instance = op.Name[:i]
	}
	e.times(m.PartialExecutionMetadata)
	for _, aux := range m.PartialExecutionMetadata.GetAuxiliaryMetadata() {
		var who repb.RequestMetadata
		var pull cloisterpb.ImagePull
		if aux.UnmarshalTo(&who) == nil {
			e.Target, e.Mnemonic, e.Invocation = who.TargetId, who.ActionMnemonic, who.ToolInvocationId
		} else if aux.UnmarshalTo(&pull) == nil {
			e.Pull = &Pull{pull.Pinned, pull.ReadBytes, pull.TotalBytes}
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
		return Execution{}, errors.New("response is not an ExecuteResponse")
	default:
		e.Status, e.Message, e.Cached = codes.Code(r.GetStatus().GetCode()).String(), r.Message, r.CachedResult
		if r.Result != nil {
			e.ExitCode = &r.Result.ExitCode
			e.times(r.Result.ExecutionMetadata)
		}
	}
	return e, nil
}

// times sets the worker and the times.
func (e *Execution) times(m *repb.ExecutedActionMetadata) {
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

// between returns the time between two moments, 0 if one is unknown.
func between(from, to *timestamppb.Timestamp) time.Duration {
	if from == nil || to == nil {
		return 0
	}
	return max(to.AsTime().Sub(from.AsTime()), 0)
}

// Failed reports whether the execution ended in failure.
func (e *Execution) Failed() bool {
	return e.Status != "" && (e.Status != codes.OK.String() || e.ExitCode != nil && *e.ExitCode != 0)
}

// The numbers of digits that ls prints of a digest and of an invocation id; every command that takes a prefix accepts
// these.
const actionDigits, invocationDigits = 12, 8

// header returns the names of the columns of line.
func header(wide bool) string {
	name := ""
	if wide {
		name = "  OPERATION OR TIME"
	}
	return columns("STATE", "CACHE", "TIME", "ACTION", "INVOCATION", "WHAT", wide, false) + name
}

// columns aligns the columns of a line; a wide line has complete digests and invocation ids.
func columns(state, cache, took, action, invocation, what string, wide, red bool) string {
	actionWidth, invocationWidth := actionDigits, len("INVOCATION")
	if wide {
		actionWidth, invocationWidth = 70, 36
	}
	return fmt.Sprintf("%s %-6s %9s  %-*s  %-*s  %s", render.Red(fmt.Sprintf("%-18s", state), red), cache, took,
		actionWidth, action, invocationWidth, invocation, what)
}

// line returns e for a person, with everything that a client chose quoted. A wide line shortens nothing, and adds the
// name of the operation or, of an entry of the history, its time.
func (e *Execution) line(wide, coloured bool) string {
	what, invocation := cmp.Or(render.QuoteAll(strings.Fields(e.Mnemonic+" "+e.Target)), "-"), "-"
	if e.Invocation != "" {
		invocation = render.Quote(shorten(e.Invocation, invocationDigits, wide))
	}
	line := columns(e.State(), e.Cache(), e.Duration(), render.Quote(shorten(e.Action, actionDigits, wide)), invocation, what,
		wide, coloured && (e.Failed() || e.Differs()))
	if wide {
		line += "  " + render.Quote(cmp.Or(e.Operation, e.Time))
	}
	if e.Instance != "" {
		line += "  in " + render.Quote(e.Instance)
	}
	if e.Pull != nil {
		image, digest, _ := strings.Cut(e.Pull.Image, "@")
		if wide {
			image += "@" + digest
		}
		line += "  image " + render.Quote(image)
	}
	if e.Caller != "" {
		line += "  by " + render.Quote(e.Caller)
	}
	return line
}

// shorten returns the first digits of a name, after the digest function that some digests state, unless wide is set.
func shorten(name string, digits int, wide bool) string {
	at := strings.IndexByte(name, ':') + 1 + digits
	if wide || len(name) <= at {
		return name
	}
	return name[:at]
}

// Differs reports whether a check found the action not reproducible.
func (e *Execution) Differs() bool { return e.Verdict == "differs" || e.Verdict == "flaky exit" }

// State returns the state or the end of the execution.
func (e *Execution) State() string {
	switch {
	case e.Pull != nil && e.Pull.Total > 0:
		share := 100 * float64(e.Pull.Read) / float64(e.Pull.Total)
		return fmt.Sprintf("pulling %d%%", int(min(share, 100))) // a registry may send more than it said
	case e.Pull != nil:
		return "pulling"
	case e.Status == "":
		return strings.ToLower(e.Stage)
	case e.Verdict != "":
		return render.Quote(e.Verdict)
	case e.Status != codes.OK.String():
		return e.Status
	case e.How == "absent", e.How == "uploaded":
		return e.How
	case e.ExitCode != nil:
		return fmt.Sprintf("exit %d", *e.ExitCode)
	}
	return strings.ToLower(e.Stage)
}

// Cache returns whether the action cache had the result, if it was asked.
func (e *Execution) Cache() string {
	switch {
	case e.Cached, e.How == "found":
		return "hit"
	case e.How == "absent", e.How == "executed", e.How == "" && e.ExitCode != nil:
		return "miss"
	}
	return "-"
}

// Duration returns how long the command ran for this request.
func (e *Execution) Duration() string {
	if e.Ran == 0 || e.Cache() == "hit" {
		return "-"
	}
	return time.Duration(e.Ran * float64(time.Second)).Round(time.Millisecond).String()
}
