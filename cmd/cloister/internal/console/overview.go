// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"errors"
	"net/http"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/operator"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

// overviewData is the data of /.
type overviewData struct {
	Live   *liveData `json:"live,omitempty"`
	Hidden string    `json:"hidden,omitempty"` // why Live is missing
	// Store is missing for callers who may not operate the server, and the rest without a history.
	Store    *storeSize            `json:"store,omitempty"`
	Failures []actions.Execution   `json:"failures"`
	Recent   []actions.Execution   `json:"recent"`
	Builds   []*actions.Invocation `json:"builds"`
}

// storeSize is the size of the store and its limit.
type storeSize struct {
	Bytes    int64 `json:"bytes"`
	MaxBytes int64 `json:"max_bytes"`
}

func overview(r *request) (any, error) {
	d := &overviewData{}
	state, err := r.state()
	switch {
	case err == nil:
		d.Live = newLive(state)
	case statusOf(err) == http.StatusForbidden:
		d.Hidden = err.Error()
	default:
		return nil, err
	}
	if s, err := r.stats(); err == nil {
		d.Store = &storeSize{s.Bytes, localstore.Budget(s.MaxBytes)}
	}
	const few = 10
	if d.Failures, err = r.rows(&actions.List{Failed: true, Limit: few}); err != nil && statusOf(err) != http.StatusForbidden {
		return nil, err
	}
	if d.Recent, err = r.rows(&actions.List{Limit: few}); err != nil && statusOf(err) != http.StatusForbidden {
		return nil, err
	}
	d.Builds, err = (&actions.Invocations{From: *r.from, Limit: few, Window: 10_000}).All(r.Context())
	if err != nil && statusOf(err) != http.StatusForbidden && !errors.Is(err, client.ErrNoHistory) {
		return nil, err
	}
	return d, nil
}

// overviewFeed is the feed of /.
func overviewFeed(r *request) (any, <-chan struct{}, bool, error) {
	state, err := r.state()
	if err != nil {
		return nil, nil, false, err
	}
	return newLive(state), nil, false, nil
}

// state returns the state of the server as the caller may see it.
func (r *request) state() (s *operator.State, err error) {
	fleet := operator.Fleet{Server: *r.from}
	err = fleet.Connect(func(c cloisterpb.FleetClient) error {
		s, err = fleet.Status(r.Context(), c)
		return err
	})
	return s, err
}

// liveData is what the overview repeats.
type liveData struct {
	*operator.State
	Lanes []lane `json:"-"`
	More  int    `json:"-"` // busy slots that are not in Lanes
}

// A lane is a busy slot.
type lane struct {
	Worker, Slot, Stage, Class, What, Action, Instance string
	Seconds                                            float64
	Width                                              int // of 1000
}

// maxLanes limits the lanes of a page.
const maxLanes = 200

func newLive(s *operator.State) *liveData {
	d := &liveData{State: s}
	longest := 10.0
	for _, w := range s.Workers {
		for _, r := range w.Running {
			if len(d.Lanes) == maxLanes {
				d.More++
				continue
			}
			longest = max(longest, r.For)
			d.Lanes = append(d.Lanes, lane{
				Worker: w.Name, Slot: r.Slot, Stage: cmp.Or(r.Stage, "-"), Class: stageClass(r.Stage),
				What: strings.TrimSpace(r.Mnemonic + " " + r.Target), Action: r.Action, Instance: r.Instance, Seconds: r.For,
			})
		}
	}
	for i := range d.Lanes {
		d.Lanes[i].Width = max(1, int(1000*d.Lanes[i].Seconds/longest))
	}
	return d
}

// stageClass returns the class of the colour of a stage.
func stageClass(name string) string {
	switch name {
	case "pull", "fetch":
		return "s1"
	case "confine", "stage":
		return "s2"
	case "run":
		return "s3"
	case "collect", "seal":
		return "s4"
	case "publish":
		return "s5"
	}
	return "s0"
}
