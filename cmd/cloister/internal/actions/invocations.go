// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

// maxStates limits the builds whose status is listed.
const maxStates = 1000

// Invocations is the flags of invocation ls.
type Invocations struct {
	From  client.Server
	Limit int
	// Window limits the entries of the history that are read; 0 reads all.
	Window int32
	JSON   bool
}

// An Invocation is the output of ls for a build.
type Invocation struct {
	ID   string `json:"invocation"`
	Last string `json:"last"` // time of the latest answer, or of the first event
	// Status is that of a build that was published with the Build Event Service: running, succeeded, failed or
	// interrupted.
	Status   string `json:"status,omitempty"`
	Executed int    `json:"executed"`
	Hits     int    `json:"hits"`
	Failed   int    `json:"failed"`
}

// Add counts an entry of the history.
func (i *Invocation) Add(e *cloisterpb.HistoryEntry) {
	switch e.How {
	case "executed":
		i.Executed++
	case "cached", "found":
		i.Hits++
	}
	if e.How != "absent" && client.Failed(e) {
		i.Failed++
	}
}

// Run prints the builds in the history, those with the latest answers first.
func (c *Invocations) Run(ctx context.Context, out io.Writer) error {
	all, err := c.All(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return render.JSON(out, all)
	}
	for n, i := range all {
		if n == 0 {
			if _, err := fmt.Fprintf(out, "%-36s  %-20s  %-11s  %8s  %6s  %6s\n", "INVOCATION", "LAST", "STATUS", "EXECUTED", "HITS", "FAILED"); err != nil {
				return err
			}
		}
		failed := render.Red(fmt.Sprintf("%6d", i.Failed), i.Failed > 0 && render.Colours(out))
		status := render.Red(fmt.Sprintf("%-11s", cmp.Or(i.Status, "-")), i.Status == buildevents.Failed && render.Colours(out))
		if _, err := fmt.Fprintf(out, "%-36s  %-20s  %s  %8d  %6d  %s\n", render.Quote(i.ID), i.Last, status, i.Executed, i.Hits, failed); err != nil {
			return err
		}
	}
	return nil
}

// All returns the builds in the history and those with events, those with the latest answers first.
func (c *Invocations) All(ctx context.Context) ([]*Invocation, error) {
	all := []*Invocation{}
	known := map[string]*Invocation{}
	err := c.From.History(ctx, &cloisterpb.ListHistoryRequest{Limit: cmp.Or(c.Window, math.MaxInt32), AllInstances: c.From.AllInstances()}, func(e *cloisterpb.HistoryEntry) error {
		i := known[e.InvocationId]
		if i == nil && e.InvocationId != "" && len(all) < c.Limit {
			i = &Invocation{ID: e.InvocationId, Last: e.Time.AsTime().UTC().Format(time.RFC3339)}
			all, known[i.ID] = append(all, i), i
		}
		if i != nil {
			i.Add(e)
		}
		return nil
	})
	if err != nil {
		return all, err
	}
	states, err := readStates(ctx, &c.From, maxStates)
	if e, ok := errors.AsType[*exit.Error](err); ok && e.Code == exit.No { // without build events, or without the right
		return all, nil
	} else if err != nil {
		return all, err
	}
	for _, s := range states {
		i := known[s.InvocationId]
		if i == nil {
			i = &Invocation{ID: s.InvocationId, Last: s.Received.AsTime().UTC().Format(time.RFC3339)}
			all = append(all, i)
		}
		i.Status = s.Status
	}
	slices.SortStableFunc(all, func(a, b *Invocation) int { return strings.Compare(b.Last, a.Last) })
	return all[:min(len(all), c.Limit)], nil
}
