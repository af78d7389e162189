// SPDX-License-Identifier: Apache-2.0

package console

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/gate"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// gatePages are the pages of reports of cloister gate.
func gatePages() []page {
	return []page{
		{"/gate", "gate", "gate.html", true, gateReports},
		{"/gate/{commit}", "", "gate_report.html", true, gateReport},
	}
}

// gateData is the data of /gate.
type gateData struct {
	Reports []gateRow `json:"reports"` // newest first
}

// A gateRow is a report in a list. Error says why it cannot be read.
type gateRow struct {
	gate.Published
	Verdict    string `json:"verdict,omitempty"`
	Mode       string `json:"mode,omitempty"`
	Passed     bool   `json:"passed"`
	Steps      int    `json:"steps"`
	Violations int    `json:"violations"`
	Error      string `json:"error,omitempty"`
}

// mayReadGate refuses callers who may not see the reports: those who may not see the audit log.
func (r *request) mayReadGate() error {
	_, err := r.stats() // of the store, which need the same right
	return err
}

func gateReports(r *request) (any, error) {
	if err := r.mayReadGate(); err != nil {
		return nil, err
	}
	all, err := gate.List(r.h.cfg.GateReports, r.number("limit", 50, 200))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no gate has run yet
		return nil, gateError(r, err)
	}
	d := &gateData{Reports: []gateRow{}}
	for _, p := range all {
		if err := r.Context().Err(); err != nil {
			return nil, err
		}
		row := gateRow{Published: p}
		report, _, err := gate.Read(r.h.cfg.GateReports, p.Commit)
		if err != nil {
			row.Error = gateError(r, err).Error()
		} else {
			row.Verdict, row.Mode, row.Passed = report.Verdict, report.Mode, report.ExitCode == 0
			row.Steps, row.Violations = len(report.Steps), report.Count()
		}
		d.Reports = append(d.Reports, row)
	}
	return d, nil
}

// gateReportData is the data of /gate/COMMIT.
type gateReportData struct {
	gate.Published
	Passed bool         `json:"passed"`
	Report *gate.Report `json:"report"`
}

func gateReport(r *request) (any, error) {
	if err := r.mayReadGate(); err != nil {
		return nil, err
	}
	report, p, err := gate.Read(r.h.cfg.GateReports, r.PathValue("commit"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, exit.New(exit.Absent, fmt.Errorf("no report of commit %s", printable.Head(p.Commit, 80)))
	case err != nil:
		return nil, gateError(r, err)
	}
	return &gateReportData{p, report.ExitCode == 0, report}, nil
}

// gateError returns err without the path of the directory. An unreadable report is not the client's fault, so the
// result does not wrap err, whose type could select another status.
func gateError(r *request, err error) error {
	return errors.New(printable.Head(strings.ReplaceAll(err.Error(), r.h.cfg.GateReports, "--gate-reports"), 500))
}
