// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// An Excess is how much later than in its turn an action got a slot, at two percentiles, and the time over which all of
// them got one.
type Excess struct{ P50, P99, Of time.Duration }

// excess compares assignments with those of a queue that serves priorities strictly and the builds of one priority in
// turns. The n-th assignment of that queue happens when the n-th in reality did.
func excess(builds []build, gave []assignment) Excess {
	if len(gave) == 0 {
		return Excess{}
	}
	gave = slices.Clone(gave)
	slices.SortFunc(gave, func(a, b assignment) int { return a.at.Compare(b.at) })
	actual := make([][]time.Time, len(builds))
	for _, g := range gave {
		actual[g.build] = append(actual[g.build], g.at)
	}
	last := gave[len(gave)-1].at
	var late []time.Duration
	for build, turn := range fairOrder(builds) {
		if len(late) == len(gave) {
			break
		}
		at := last // or later
		if turn < len(actual[build]) {
			at = actual[build][turn]
		}
		late = append(late, max(0, at.Sub(gave[len(late)].at)))
	}
	slices.Sort(late)
	return Excess{late[len(late)/2], late[len(late)*99/100], last.Sub(gave[0].at)}
}

// fairOrder yields all actions in the order of their turns, each as a build and a position in it.
func fairOrder(builds []build) func(yield func(build, turn int) bool) {
	byPriority := map[int32][]int{}
	for i, b := range builds {
		byPriority[b.priority] = append(byPriority[b.priority], i)
	}
	return func(yield func(int, int) bool) {
		for _, p := range slices.Sorted(maps.Keys(byPriority)) {
			left := slices.Clone(byPriority[p])
			for turn := 0; len(left) > 0; turn++ {
				left = slices.DeleteFunc(left, func(b int) bool { return turn >= len(builds[b].actions) })
				for _, b := range left {
					if !yield(b, turn) {
						return
					}
				}
			}
		}
	}
}

// Text prints results as a table in Markdown.
func Text(w io.Writer, results []*Result, timeout time.Duration) error {
	_, err := fmt.Fprintf(w, "| workers x slots | KiB per idle slot | waiting | builds | submitted/s | KiB per waiting action | actions/s | CPU of head per action "+
		"| later than its turn: p50, p99 | %v or more of silence: noticed | restart |\n|---|---|---|---|---|---|---|---|---|---|---|\n", timeout)
	for _, r := range results {
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "| %d x %d | %.1f | %d | %d | %.0f | %.1f | %.0f | %.2f ms | %.1f %%, %.1f %% of %.1f s | %d workers in %.1f s | %.1f s |\n",
			r.Workers, r.Slots, r.Idle/1024, r.Actions, r.Builds, r.Submitted, r.Memory/1024, r.Rate, r.CPU.Seconds()*1000,
			r.Waiting.percent(r.Waiting.P50), r.Waiting.percent(r.Waiting.P99), r.Waiting.Of.Seconds(),
			r.Lost, r.Noticed.Seconds(), r.Restarted.Seconds())
	}
	return err
}

func (e Excess) percent(d time.Duration) float64 { return 100 * float64(d) / float64(max(e.Of, 1)) }
