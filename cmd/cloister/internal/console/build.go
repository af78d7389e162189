// SPDX-License-Identifier: Apache-2.0

package console

import (
	"errors"
	"slices"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/internal/exit"
)

// buildEvents returns the summary of the events of a build, or nil if the server has none.
func buildEvents(r *request, id string) (*buildevents.Build, error) {
	b, err := actions.ReadBuild(r.Context(), r.from, id)
	if e, ok := errors.AsType[*exit.Error](err); ok && (e.Code == exit.Absent || e.Code == exit.No) {
		return nil, nil
	}
	return b, err
}

// maxParts limits the results of tests, and the files of targets and tests, that a page shows of a build.
const maxParts = 5000

// shorten removes what a page does not show of a large build, and reports whether there is any. What failed comes first.
func shorten(b *buildevents.Build) (less bool) {
	fine := func(t *buildevents.Target) bool {
		return (t.Outcome == "built" || t.Outcome == "") && (t.Test == nil || t.Test.Status == "passed")
	}
	all := slices.DeleteFunc(slices.Clone(b.Targets), fine)
	all = append(all, slices.DeleteFunc(b.Targets, func(t *buildevents.Target) bool { return !fine(t) })...)
	b.Targets = all[:min(len(all), blobview.MaxRows)]
	less = len(b.Targets) < len(all)
	left := maxParts
	fit := func(n int) int {
		n, less = min(n, left), less || n > left
		left -= n
		return n
	}
	for _, t := range b.Targets {
		if t.Test != nil {
			t.Test.Results = t.Test.Results[:fit(len(t.Test.Results))]
			for i := range t.Test.Results {
				r := &t.Test.Results[i]
				r.Files = r.Files[:fit(len(r.Files))]
			}
		}
		t.Outputs = t.Outputs[:fit(len(t.Outputs))]
	}
	return less
}
