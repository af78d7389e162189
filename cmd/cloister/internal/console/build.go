// SPDX-License-Identifier: Apache-2.0

package console

import (
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
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
