// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/protobuf/proto"
)

// View returns the URL of a page about the action: inputs, sandbox or repro.
func (d *actionData) View(name string) string {
	u := url.URL{Path: link("/a/", d.Digest, "") + "/" + name, RawQuery: url.Values{"instance": {d.Instance}}.Encode()}
	return u.String()
}

// A run is the latest run of an action.
type run struct {
	function cas.Function
	response *repb.ExecuteResponse // fields that are unknown are empty
}

// results are a store and its action cache.
type results interface {
	cas.Store
	cas.ActionCache
}

// latestRun returns the latest run of an action: the failed one that the history has, or the cached result. If there is
// neither, it is empty.
func latestRun(r *request, store results, action cas.Digest) (*run, error) {
	found := &run{action.Function(), &repb.ExecuteResponse{}}
	e, err := r.from.LatestRun(r.Context(), action, false)
	if err != nil {
		return nil, err
	}
	if client.Failed(e) && e.Response != "" {
		d, err := cas.ParseDigest(e.Response)
		if err == nil {
			err = cas.ReadProto(r.Context(), store, d, found.response)
		}
		if errors.Is(err, cas.ErrNotFound) { // evicted
			err = nil
		}
		return found, err
	}
	found.response.Result, err = store.Lookup(r.Context(), action)
	if errors.Is(err, cas.ErrNotFound) {
		err = nil
	}
	return found, err
}

// metadata fills m with the metadata of its type, and reports whether the worker left any.
func (n *run) metadata(m proto.Message) bool {
	for _, aux := range n.response.GetResult().GetExecutionMetadata().GetAuxiliaryMetadata() {
		if aux.MessageIs(m) {
			return aux.UnmarshalTo(m) == nil
		}
	}
	return false
}

// auditLog returns the digest of the run's audit log, or the zero Digest. Cached results have it only in their
// metadata.
func (n *run) auditLog() cas.Digest {
	log := n.response.GetServerLogs()[worker.AuditLogName]
	d, err := cas.FromProto(n.function, log.GetDigest())
	var details cloisterpb.Execution
	if err != nil && n.metadata(&details) {
		d, _ = cas.ParseDigest(details.AuditLog)
	}
	return d
}

// unread returns the inputs that the run did not read, or nil if that is unknown.
func (n *run) unread(ctx context.Context, store cas.Store) *blobview.Unread {
	var details cloisterpb.Execution
	if n.metadata(&details) && details.UnreadInputs != nil && *details.UnreadInputs == 0 {
		return blobview.AllRead()
	}
	log := n.auditLog()
	if log.IsZero() {
		return nil
	}
	u, _ := blobview.ReadUnread(ctx, store, log) // it may be evicted
	return u
}

// runData is the data of /a/DIGEST/sandbox.
type runData struct {
	Action   string                `json:"action"`
	Instance string                `json:"instance"`
	Known    bool                  `json:"known"` // there is a result with metadata
	Details  *cloisterpb.Execution `json:"-"`
	Events   []eventRow            `json:"events"`
	Omitted  int64                 `json:"omitted"`
	Log      cas.Digest            `json:"log,omitzero"` // the audit log of the run
}

// LogLink returns the URL of the run's audit log, "" without one.
func (d *runData) LogLink() string {
	if d.Log.IsZero() {
		return ""
	}
	return blobLink(d.Log, d.Instance, "text")
}

// An eventRow is a denied or undeclared access, or a limit that was met.
type eventRow struct {
	Kind    string `json:"kind"`
	Subject string `json:"subject"`
	Syscall string `json:"syscall,omitempty"`
	Process string `json:"process,omitempty"`
	Count   int64  `json:"count"`
	Text    string `json:"text"` // with what to do about it
}

func violations(r *request) (any, error) {
	a, err := r.from.Action(r.Context(), digestName(r.PathValue("digest")))
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	defer store.Close()
	found, err := latestRun(r, store, a.Digest)
	if err != nil {
		return nil, err
	}
	d := &runData{Action: a.Digest.String(), Instance: r.from.Instance, Details: &cloisterpb.Execution{}, Log: found.auditLog()}
	d.Known = found.metadata(d.Details)
	d.Omitted = d.Details.EventsOmitted
	for _, e := range d.Details.Events {
		event := sandbox.Event{
			Kind: sandbox.EventKind(e.Kind), Subject: e.Subject, Syscall: e.Syscall, Process: e.Process, Count: int(e.Count),
			Actual: e.Actual, Limit: e.Limit, Detail: e.Detail,
		}
		d.Events = append(d.Events, eventRow{e.Kind, e.Subject, e.Syscall, e.Process, max(e.Count, 1), event.String()})
	}
	return d, nil
}

// checksData is the data of /a/DIGEST/repro.
type checksData struct {
	Action   string     `json:"action"`
	Instance string     `json:"instance"`
	Checks   []checkRow `json:"checks"` // latest first
	Command  string     `json:"command"`
}

// A checkRow is a verdict that the server recorded.
type checkRow struct {
	Number  uint64    `json:"number"` // in the history
	Time    time.Time `json:"time"`
	Verdict string    `json:"verdict"`
	Report  string    `json:"report,omitempty"` // digest of the repro.Verdict in JSON
}

// Link returns the URL of the report of a check.
func (d *checksData) Link(number uint64) string {
	u := url.URL{Path: link("/a/", d.Action, "") + "/repro/report"}
	u.RawQuery = url.Values{"instance": {d.Instance}, "n": {strconv.FormatUint(number, 10)}}.Encode()
	return u.String()
}

// Latest returns the latest verdict.
func (d *checksData) Latest() string {
	if len(d.Checks) == 0 {
		return ""
	}
	return cmp.Or(d.Checks[0].Verdict, "unknown")
}

func checks(r *request) (any, error) { return r.checks() }

// checks returns the checks of the action that the path names.
func (r *request) checks() (*checksData, error) {
	a, err := r.from.Action(r.Context(), digestName(r.PathValue("digest")))
	if err != nil {
		return nil, err
	}
	d := &checksData{Action: a.Digest.String(), Instance: r.from.Instance}
	command := []string{"cloister", "repro", d.Action, "--report", "report.html"}
	if d.Instance != "" {
		command = append(command, "--instance", d.Instance)
	}
	d.Command = render.QuoteAll(command)
	const most = 1000
	req := &cloisterpb.ListHistoryRequest{Action: d.Action, Limit: most}
	err = r.from.History(r.Context(), req, func(e *cloisterpb.HistoryEntry) error {
		if e.How == "checked" {
			d.Checks = append(d.Checks, checkRow{e.Number, e.Time.AsTime(), e.Verdict, e.Response})
		}
		return nil
	})
	if err != nil && !errors.Is(err, client.ErrNoHistory) {
		return nil, fmt.Errorf("checks of action %s: %w", d.Action, err)
	}
	return d, nil
}

// A report is a page that repro.Report made, with its style.
type report []byte

// ServeHTTP implements http.Handler.
func (p report) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox")
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Write(p) //nolint:errcheck // the browser is gone
}

// checkReport serves the report of the check with the number n in the history. Only the server's own history names the
// blob, since nobody else may choose what is rendered.
func checkReport(r *request) (any, error) {
	d, err := r.checks()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(d.Checks, func(c checkRow) bool { return strconv.FormatUint(c.Number, 10) == r.FormValue("n") && c.Report != "" })
	if i < 0 {
		return nil, fmt.Errorf("action %s has no report %.20q: %w", d.Action, r.FormValue("n"), cas.ErrNotFound)
	}
	blob, err := cas.ParseDigest(d.Checks[i].Report)
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	defer store.Close()
	data, err := cas.ReadAll(r.Context(), store, blob, cas.MaxMessage)
	if err != nil {
		return nil, fmt.Errorf("report of action %s: %w", d.Action, err)
	}
	var v repro.Verdict
	if err := json.Unmarshal(data, &v); err != nil {
		return nil, fmt.Errorf("report of action %s: %w", d.Action, err)
	}
	page, err := repro.Report{&v}.HTML()
	return report(page), err
}
