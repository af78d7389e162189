// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
)

const (
	// maxTrace limits the decompressed size of Bazel's profile, and maxTraceValue that of each of its values, which are
	// decoded in memory.
	maxTrace      = 512 << 20
	maxTraceValue = 1 << 20
	// maxLanes limits the rows per worker. Concurrent actions are in different rows.
	maxLanes = 1024
	// queueProcess is the process ID of the queue in a trace. Those of workers follow. Bazel's is 1.
	queueProcess = 1000
)

// A traceEvent is an event of the Trace Event Format, which Perfetto reads. Times are in microseconds.
type traceEvent struct {
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Phase    string         `json:"ph"`
	ID       string         `json:"id,omitempty"`
	Process  int            `json:"pid"`
	Lane     int            `json:"tid"`
	Begin    float64        `json:"ts"`
	Duration float64        `json:"dur"` // Perfetto drops a stage without it
	Args     map[string]any `json:"args,omitempty"`
}

// A traceWriter writes a trace as JSON.
type traceWriter struct {
	out    *bufio.Writer
	events int
	start  time.Time // time 0 of the trace
	err    error     // the first of out
}

// event writes text, an event in JSON.
func (w *traceWriter) event(text []byte) {
	separator := ",\n"
	if w.events++; w.events == 1 {
		separator = "\n"
	}
	if w.err == nil {
		_, w.err = w.out.WriteString(separator)
	}
	if w.err == nil {
		_, w.err = w.out.Write(text)
	}
}

func (w *traceWriter) add(e *traceEvent) {
	text, err := json.Marshal(e)
	if err != nil && w.err == nil {
		w.err = err
	}
	w.event(text)
}

// at converts a time of the server to a time of the trace.
func (w *traceWriter) at(t time.Time) float64 { return micros(t.Sub(w.start)) }

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// writeTrace merges Bazel's profile, which may be nil, and the executions of a build into one trace. The trace begins
// when the profile does; if the profile does not state when, at started; if that is zero, at the first execution. If
// the profile is damaged, the trace has the events before the damage and a note of the problem, which writeTrace also
// returns.
func writeTrace(
	out io.Writer, profile io.Reader, started time.Time, entries []*cloisterpb.HistoryEntry, about map[string]any,
) (problem, err error) {
	w := &traceWriter{out: bufio.NewWriter(out), start: started}
	_, w.err = w.out.WriteString(`{"traceEvents":[`)
	tool := json.RawMessage("{}")
	if profile != nil {
		if tool, problem = w.copyProfile(profile); problem != nil {
			about["problem"] = "Bazel's profile: " + problem.Error()
		}
		var facts struct {
			Start int64 `json:"profile_start_ts"` // in milliseconds; Bazel 6 and later state it
		}
		if json.Unmarshal(tool, &facts) == nil && facts.Start > 0 && facts.Start < 253402300800_000 {
			w.start = time.UnixMilli(facts.Start)
		}
	}
	w.server(entries)
	if w.err != nil {
		return problem, w.err
	}
	text, err := json.Marshal(about)
	if err != nil {
		return problem, err
	}
	if _, err := fmt.Fprintf(w.out, "\n],\"otherData\":%s,\"cloister\":%s}\n", tool, text); err != nil {
		return problem, err
	}
	return problem, w.out.Flush()
}

// copyProfile copies the events of Bazel's profile and returns its otherData.
func (w *traceWriter) copyProfile(in io.Reader) (about json.RawMessage, err error) {
	about = json.RawMessage("{}")
	values := &valueReader{value: maxTraceValue, left: maxTrace}
	compressed := bufio.NewReader(in)
	if values.in = compressed; startsAs(compressed, "\x1f\x8b") {
		if values.in, err = gzip.NewReader(compressed); err != nil {
			return about, err
		}
	}
	d := json.NewDecoder(values)
	if err := delimiter(d, json.Delim('{')); err != nil {
		return about, err
	}
	for values.next(); d.More(); values.next() {
		name, err := d.Token()
		if err != nil {
			return about, err
		}
		values.next()
		switch name {
		case "traceEvents":
			err = w.copyEvents(d, values)
		case "otherData":
			var text json.RawMessage
			if err = d.Decode(&text); err == nil && text[0] == '{' {
				about = bytes.ToValidUTF8(text, []byte("\uFFFD"))
			}
		default:
			err = d.Decode(&json.RawMessage{})
		}
		if err != nil {
			return about, err
		}
	}
	return about, delimiter(d, json.Delim('}'))
}

func startsAs(r *bufio.Reader, magic string) bool {
	head, _ := r.Peek(len(magic)) // the next read returns the error
	return string(head) == magic
}

// copyEvents copies an array of events.
func (w *traceWriter) copyEvents(d *json.Decoder, values *valueReader) error {
	if err := delimiter(d, json.Delim('[')); err != nil {
		return err
	}
	for values.next(); d.More(); values.next() {
		var text json.RawMessage
		if err := d.Decode(&text); err != nil {
			return err
		}
		if text[0] == '{' {
			w.event(bytes.ToValidUTF8(text, []byte("\uFFFD")))
		}
		if w.err != nil {
			return w.err // the client disconnected
		}
	}
	return delimiter(d, json.Delim(']'))
}

func delimiter(d *json.Decoder, want json.Delim) error {
	if got, err := d.Token(); err != nil {
		return err
	} else if got != want {
		return fmt.Errorf("got %.20q in place of %s", fmt.Sprint(got), want)
	}
	return nil
}

// A valueReader limits what a json.Decoder reads, in total and for each value, which the decoder holds in memory.
type valueReader struct {
	in          io.Reader
	value, left int64 // bytes that the current value and all values may still take
}

// next begins a new value.
func (r *valueReader) next() { r.value = maxTraceValue }

// Read implements io.Reader.
func (r *valueReader) Read(p []byte) (int, error) {
	most := min(r.value, r.left)
	if most <= 0 {
		return 0, errors.New("it exceeds a limit")
	}
	n, err := r.in.Read(p[:min(int64(len(p)), most)])
	r.value, r.left = r.value-int64(n), r.left-int64(n)
	return n, err
}

// server writes the executions among entries of the history. An entry states the time of the response and the duration
// of each stage before it.
func (w *traceWriter) server(entries []*cloisterpb.HistoryEntry) {
	began := func(e *cloisterpb.HistoryEntry) time.Time {
		return e.Time.AsTime().Add(-e.Prepared.AsDuration() - e.Ran.AsDuration() - e.Stored.AsDuration())
	}
	slices.SortStableFunc(entries, func(a, b *cloisterpb.HistoryEntry) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), began(a).Compare(began(b)))
	})
	var first time.Time
	for _, e := range entries {
		if t := began(e).Add(-e.Waited.AsDuration()); first.IsZero() || t.Before(first) {
			first = t
		}
	}
	if w.start.IsZero() {
		w.start = first
	}
	process := queueProcess
	w.name(process, "cloister queue")
	var ends []time.Time // of the last execution in each row of the worker
	for i, e := range entries {
		if i == 0 || e.Worker != entries[i-1].Worker {
			process, ends = process+1, nil
			w.name(process, "cloister worker "+e.Worker)
		}
		begin := began(e)
		lane := slices.IndexFunc(ends, func(end time.Time) bool { return !end.After(begin) })
		switch {
		case lane >= 0:
		case len(ends) < maxLanes:
			lane, ends = len(ends), append(ends, time.Time{})
		default:
			lane = maxLanes - 1
		}
		ends[lane] = e.Time.AsTime()
		w.execution(e, process, lane, begin)
	}
}

func (w *traceWriter) name(process int, name string) {
	w.add(&traceEvent{Name: "process_name", Phase: "M", Process: process, Args: map[string]any{"name": name}})
}

// execution writes an action and, if it ran, its stages, which may have a duration of 0. Actions overlap while they
// wait in the queue, so these events are asynchronous.
func (w *traceWriter) execution(e *cloisterpb.HistoryEntry, process, lane int, begin time.Time) {
	name := e.ActionMnemonic + " " + e.TargetId
	if name == " " {
		name = e.Action
	}
	if wait := e.Waited.AsDuration(); wait > 0 {
		id := strconv.FormatUint(e.Number, 10)
		w.add(&traceEvent{Name: name, Category: "queue", Phase: "b", ID: id, Process: queueProcess, Begin: w.at(begin.Add(-wait))})
		w.add(&traceEvent{Name: name, Category: "queue", Phase: "e", ID: id, Process: queueProcess, Begin: w.at(begin)})
	}
	w.add(&traceEvent{
		Name: name, Category: "action", Phase: "X", Process: process, Lane: lane, Begin: w.at(begin),
		Duration: max(1, micros(e.Time.AsTime().Sub(begin))),
		Args: map[string]any{
			"action": e.Action, "instance": e.InstanceName, "mnemonic": e.ActionMnemonic, "target": e.TargetId, "code": e.Code,
			"exit_code": e.ExitCode,
		},
	})
	if e.Prepared == nil && e.Ran == nil && e.Stored == nil {
		return
	}
	for _, s := range []struct {
		name string
		took time.Duration
	}{{"prepare", e.Prepared.AsDuration()}, {"run", e.Ran.AsDuration()}, {"store", e.Stored.AsDuration()}} {
		w.add(&traceEvent{
			Name: s.name, Category: "stage", Phase: "X", Process: process, Lane: lane, Begin: w.at(begin), Duration: micros(s.took),
		})
		begin = begin.Add(s.took)
	}
}
