// SPDX-License-Identifier: Apache-2.0

package console

import (
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/repro/changes"
)

// diffData is the data of /diff.
type diffData struct {
	A      string            `json:"a"`
	B      string            `json:"b"`
	Builds bool              `json:"builds,omitempty"`
	Report comparison.Report `json:"report,omitempty"` // nil without A and B
}

// comparisons limits the comparisons in progress: each takes up to 300 MB.
var comparisons = make(chan struct{}, 1)

func diff(r *request) (any, error) {
	d := &diffData{A: r.FormValue("a"), B: r.FormValue("b"), Builds: r.FormValue("builds") != ""}
	if d.A == "" || d.B == "" {
		return d, nil
	}
	select {
	case comparisons <- struct{}{}:
		defer func() { <-comparisons }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	c := comparison.Config{From: *r.from, Remote: true, Invocation: d.Builds, Names: d.Builds, Results: r.FormValue("results") != ""}
	var err error
	d.Report, err = c.Compare(r.Context(), digestName(d.A), digestName(d.B))
	if errors.Is(err, changes.ErrTooLarge) {
		err = exit.New(exit.No, errors.New("the blobs are too large to be compared here: use cloister diff"))
	}
	return d, err
}
