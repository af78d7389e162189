// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

const (
	// maxEntries limits the entries of a build that its page counts, maxBars those that its timeline shows, and maxRows
	// those in a table.
	maxEntries = 200_000
	maxBars    = 800
	maxRows    = 25
)

// invocationData is the data of /i/ID.
type invocationData struct {
	actions.Invocation
	Callers   []string            `json:"callers,omitempty"`
	Truncated bool                `json:"truncated,omitempty"` // there are more entries
	Mnemonics []*mnemonicCount    `json:"mnemonics"`
	Durations []bucket            `json:"durations"`
	Slowest   []actions.Execution `json:"slowest"`
	Failures  []actions.Execution `json:"failures,omitempty"`
	Misses    []actions.Execution `json:"misses,omitempty"`
	Timeline  timeline            `json:"timeline"`
	Build     *buildevents.Build  `json:"build,omitempty"`     // what Bazel published
	Shortened bool                `json:"shortened,omitempty"` // Build has less than that
	Profile   string              `json:"profile"`             // path of a trace for Perfetto
	Events    string              `json:"-"`                   // URL of the feed, "" if nothing changes any more

	longest []*cloisterpb.HistoryEntry // executions
}

// A mnemonicCount counts the actions of a kind.
type mnemonicCount struct {
	Mnemonic string  `json:"mnemonic"`
	Executed int     `json:"executed"`
	Hits     int     `json:"hits"`
	Failed   int     `json:"failed"`
	Seconds  float64 `json:"seconds"` // of executions
}

// A bucket is a row of a histogram.
type bucket struct {
	Label string `json:"label"`
	Count int64  `json:"count"`
	Width int    `json:"-"` // of 1000
}

// widths sets the widths of buckets.
func widths(all []bucket) []bucket {
	most := int64(1)
	for _, b := range all {
		most = max(most, b.Count)
	}
	for i := range all {
		all[i].Width = int(1000 * all[i].Count / most)
	}
	return all
}

// durations are the upper bounds of the histogram.
var durations = []struct {
	below time.Duration
	label string
}{
	{10 * time.Millisecond, "below 10 ms"},
	{100 * time.Millisecond, "below 100 ms"},
	{time.Second, "below 1 s"},
	{10 * time.Second, "below 10 s"},
	{time.Minute, "below 1 min"},
	{10 * time.Minute, "below 10 min"},
	{math.MaxInt64, "longer"},
}

func invocation(r *request) (any, error) {
	id, err := r.from.Invocation(r.Context(), r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	d, err := readInvocation(r, id)
	if err != nil {
		return nil, err
	}
	if d.following() {
		u := *r.URL
		u.Path = "/i/" + id + "/events"
		d.Events = u.RequestURI()
	}
	return d, nil
}

// readInvocation returns what the server knows about a build.
func readInvocation(r *request, id string) (*invocationData, error) {
	d := &invocationData{Mnemonics: []*mnemonicCount{}}
	d.ID, d.Profile = id, (&url.URL{Path: "/i/" + id + "/profile.gz", RawQuery: r.URL.RawQuery}).String()
	for _, b := range durations {
		d.Durations = append(d.Durations, bucket{Label: b.label})
	}
	filter := client.Filter{Invocation: id}
	req := filter.Request(maxEntries)
	req.AllInstances = r.from.AllInstances()
	n := 0
	err := r.from.History(r.Context(), req, func(e *cloisterpb.HistoryEntry) error {
		if n++; n == 1 {
			d.Last = e.Time.AsTime().UTC().Format(time.RFC3339)
		}
		d.count(e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if d.Build, err = buildEvents(r, id); err != nil {
		return nil, err
	}
	if d.Build != nil {
		d.Status, d.Shortened = d.Build.Status, shorten(d.Build)
	}
	if n == 0 && d.Build == nil {
		return nil, exit.New(exit.Absent, fmt.Errorf("the history has no build %s", strconv.QuoteToASCII(id)))
	}
	d.Truncated = n == maxEntries
	slices.SortFunc(d.Mnemonics, func(a, b *mnemonicCount) int {
		return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Mnemonic, b.Mnemonic))
	})
	d.Mnemonics = d.Mnemonics[:min(len(d.Mnemonics), 200)]
	d.Durations = widths(d.Durations)
	d.cut()
	d.Slowest = []actions.Execution{}
	for _, e := range d.longest[:min(len(d.longest), maxRows)] {
		d.Slowest = append(d.Slowest, actions.OfEntry(e))
	}
	omitted := d.Timeline.Omitted
	d.Timeline = newTimeline(d.longest)
	d.Timeline.Omitted = omitted
	return d, nil
}

// cut keeps the longest executions, the longest first, and counts the others.
func (d *invocationData) cut() {
	slices.SortStableFunc(d.longest, func(a, b *cloisterpb.HistoryEntry) int {
		return cmp.Compare(b.Ran.AsDuration(), a.Ran.AsDuration())
	})
	n := min(len(d.longest), maxBars)
	d.Timeline.Omitted += len(d.longest) - n
	clear(d.longest[n:])
	d.longest = d.longest[:n]
}

// count adds an entry to the counts.
func (d *invocationData) count(e *cloisterpb.HistoryEntry) {
	d.Add(e)
	if !slices.Contains(d.Callers, e.Caller) && len(d.Callers) < 10 && e.Caller != "" {
		d.Callers = append(d.Callers, e.Caller)
	}
	row := actions.OfEntry(e)
	if e.How != "absent" && client.Failed(e) && len(d.Failures) < maxRows {
		d.Failures = append(d.Failures, row)
	}
	if e.How == "absent" && len(d.Misses) < maxRows {
		d.Misses = append(d.Misses, row)
	}
	ran := e.How == "executed" && e.Ran != nil
	if ran {
		d.longest = append(d.longest, e)
	}
	if len(d.longest) == 4*maxBars {
		d.cut()
	}
	i := slices.IndexFunc(d.Mnemonics, func(m *mnemonicCount) bool { return m.Mnemonic == e.ActionMnemonic })
	if i < 0 {
		if len(d.Mnemonics) == 1000 {
			return
		}
		i = len(d.Mnemonics)
		d.Mnemonics = append(d.Mnemonics, &mnemonicCount{Mnemonic: e.ActionMnemonic})
	}
	var one actions.Invocation
	one.Add(e)
	m := d.Mnemonics[i]
	m.Executed, m.Hits, m.Failed = m.Executed+one.Executed, m.Hits+one.Hits, m.Failed+one.Failed
	if !ran {
		return
	}
	m.Seconds += e.Ran.AsDuration().Seconds()
	for i, b := range durations {
		if e.Ran.AsDuration() < b.below {
			d.Durations[i].Count++
			return
		}
	}
}

// A timeline shows when actions ran, in rows of each worker.
type timeline struct {
	Seconds float64  `json:"seconds"`
	Rows    []string `json:"rows"` // the worker of each
	Bars    []bar    `json:"bars"`
	Omitted int      `json:"omitted,omitempty"` // short actions
	Height  int      `json:"-"`
}

// A bar is an action.
type bar struct {
	Row     int     `json:"row"`
	Begin   float64 `json:"begin_seconds"`
	Seconds float64 `json:"seconds"`
	Action  string  `json:"action"`
	What    string  `json:"what"`
	Failed  bool    `json:"failed,omitempty"`
	X       int     `json:"-"`
	Y       int     `json:"-"`
	Width   int     `json:"-"`
	// Instance is that of the action.
	Instance string `json:"instance,omitempty"`
}

// rowHeight is the height of a row of a timeline.
const rowHeight = 14

// newTimeline arranges executed actions. The history knows when a run ended, its length and its worker, not its slot:
// runs of a worker that overlap get different rows.
func newTimeline(entries []*cloisterpb.HistoryEntry) (t timeline) {
	if len(entries) == 0 {
		return t
	}
	begin := func(e *cloisterpb.HistoryEntry) time.Time { return e.Time.AsTime().Add(-e.Ran.AsDuration()) }
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries, func(a, b *cloisterpb.HistoryEntry) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), begin(a).Compare(begin(b)))
	})
	first, last := begin(entries[0]), entries[0].Time.AsTime()
	for _, e := range entries {
		if b := begin(e); b.Before(first) {
			first = b
		}
		if end := e.Time.AsTime(); end.After(last) {
			last = end
		}
	}
	t.Seconds = last.Sub(first).Seconds()
	scale := 1000 / max(t.Seconds, 0.001)
	var ends []time.Time
	for _, e := range entries {
		from := begin(e)
		row := 0
		for row < len(t.Rows) && (t.Rows[row] != e.Worker || ends[row].After(from)) {
			row++
		}
		if row == len(t.Rows) {
			t.Rows, ends = append(t.Rows, e.Worker), append(ends, time.Time{})
		}
		ends[row] = e.Time.AsTime()
		b := bar{
			Row: row, Begin: from.Sub(first).Seconds(), Seconds: e.Ran.AsDuration().Seconds(), Action: e.Action,
			What: e.ActionMnemonic + " " + e.TargetId, Failed: client.Failed(e), Instance: e.InstanceName,
		}
		b.X, b.Y, b.Width = int(b.Begin*scale), row*rowHeight, max(1, int(b.Seconds*scale))
		t.Bars = append(t.Bars, b)
	}
	t.Height = len(t.Rows) * rowHeight
	return t
}

// uitoa returns n in decimal digits.
func uitoa(n uint64) string { return strconv.FormatUint(n, 10) }
