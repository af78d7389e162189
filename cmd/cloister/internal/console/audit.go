// SPDX-License-Identifier: Apache-2.0

package console

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/auditlog"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/audit"
	"google.golang.org/grpc"
)

// auditData is the data of /audit.
type auditData struct {
	Kind    string     `json:"kind,omitempty"`
	Action  string     `json:"action,omitempty"` // prefix of a digest
	Kinds   []string   `json:"-"`
	Records []auditRow `json:"records"` // newest first
	// First is the number of the first entry that was read, and Head the hash of the last one. Damage says why the
	// entries cannot be trusted.
	First  uint64 `json:"first"`
	Head   string `json:"head,omitempty"`
	Damage string `json:"damage,omitempty"`
}

// An auditRow is an entry of the audit log.
type auditRow struct {
	Seq      uint64    `json:"seq"`
	Time     time.Time `json:"time"`
	Action   string    `json:"action,omitempty"`
	Instance string    `json:"instance,omitempty"`
	Target   string    `json:"target,omitempty"`
	Lines    []string  `json:"lines"`
}

// audits limits the copies of the audit log on disk.
var audits = make(chan struct{}, 1)

// auditLog shows the newest entries of the audit log. It reads the newest files of at most 16 MiB, not the whole log.
func auditLog(r *request) (any, error) {
	d := &auditData{Kind: r.FormValue("kind"), Action: digestName(r.FormValue("action")), Kinds: auditlog.Kinds}
	if d.Kind != "" && !slices.Contains(d.Kinds, d.Kind) {
		return nil, fmt.Errorf("%w: unknown kind of event %+.40q", cas.ErrInvalid, d.Kind)
	}
	if err := r.operator(); err != nil {
		return nil, err
	}
	select {
	case audits <- struct{}{}:
		defer func() { <-audits }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	conn, _, err := r.from.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	since := time.Now()
	limit := r.number("limit", 200, 1000)
	for range 2 { // the newest file may have few entries
		began, err := d.read(r, conn, since, limit)
		if err != nil {
			return nil, err
		}
		if d.Damage != "" || d.First <= 1 || len(d.Records) >= limit {
			break
		}
		since = began.Add(-time.Nanosecond)
	}
	return d, nil
}

// read reads the files with entries since a time, and returns the time of the first entry.
func (d *auditData) read(r *request, conn *grpc.ClientConn, since time.Time, limit int) (began time.Time, err error) {
	dir, err := os.MkdirTemp("", "cloister-audit-")
	if err != nil {
		return began, err
	}
	defer os.RemoveAll(dir)
	if err := auditlog.Download(r.Context(), conn, since, dir); err != nil {
		return began, r.from.ExplainCall(err)
	}
	d.Records, d.First, d.Head = nil, 0, ""
	err = audit.Read(dir, func(rec audit.Record) error {
		if d.First == 0 {
			d.First, began = rec.Seq, rec.Time
		}
		d.Head = rec.Hash
		lines := rec.Events
		if !strings.HasPrefix(rec.Action, d.Action) {
			return nil
		}
		row := auditRow{Seq: rec.Seq, Time: rec.Time, Action: rec.Action, Instance: rec.Instance, Target: rec.Target}
		for _, e := range lines {
			if d.Kind == "" || sandbox.EventKind(d.Kind) == e.Kind {
				row.Lines = append(row.Lines, string(e.Kind)+": "+e.String())
			}
		}
		if rec.Note != "" && (d.Kind == "" || d.Kind == "note") {
			row.Lines = append(row.Lines, "note: "+rec.Note)
		}
		if rec.Unrecorded > 0 && (d.Kind == "" || d.Kind == "more") {
			row.Lines = append(row.Lines, fmt.Sprintf("more: %d events were not recorded", rec.Unrecorded))
		}
		if len(row.Lines) > 0 {
			d.Records = append(d.Records, row)
			d.Records = d.Records[max(0, len(d.Records)-limit):]
		}
		return nil
	})
	slices.Reverse(d.Records)
	switch {
	case errors.Is(err, audit.ErrTampered):
		d.Damage, err = strings.ReplaceAll(err.Error(), dir+"/", ""), nil
	case errors.Is(err, fs.ErrNotExist): // there is no log yet
		err = nil
	}
	return began, err
}
