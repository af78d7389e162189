// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// trace is a trace as its readers see it.
type trace struct {
	Events []traceEvent   `json:"traceEvents"`
	Tool   map[string]any `json:"otherData"`
	About  struct{ Problem string }
}

// written returns the trace of a profile and entries. The profile is "" if there is none.
func written(t *testing.T, profile string, started time.Time, entries ...*cloisterpb.HistoryEntry) (tr trace, problem string) {
	t.Helper()
	var in io.Reader
	if profile != "" {
		in = strings.NewReader(profile)
	}
	var out bytes.Buffer
	why := must.Get(writeTrace(&out, in, started, entries, map[string]any{}))(t)
	must.Be(t, utf8.Valid(out.Bytes()), "the trace is not UTF-8: %q", out.Bytes())
	must.Succeed(t, json.Unmarshal(out.Bytes(), &tr))
	if why != nil {
		problem = why.Error()
	}
	return tr, problem
}

var zero = time.Unix(1_800_000_000, 0)

// executed returns an entry that waited for 1 s, was prepared for 2 s, ran for 3 s and was stored for 4 s, up to a
// time.
func executed(number uint64, end time.Time, worker string) *cloisterpb.HistoryEntry {
	return &cloisterpb.HistoryEntry{
		Number: number, Time: timestamppb.New(end), How: "executed", Action: "a/1", TargetId: "//a:b", ActionMnemonic: "Cpp", Worker: worker,
		Waited: durationpb.New(time.Second), Prepared: durationpb.New(2 * time.Second), Ran: durationpb.New(3 * time.Second),
		Stored: durationpb.New(4 * time.Second),
	}
}

const bazelProfile = `{"otherData":{"build_id":"x","profile_start_ts":1800000000000},"traceEvents":[
{"name":"process_name","ph":"M","pid":1,"tid":0},
{"name":"evaluate","ph":"X","pid":1,"tid":3,"ts":5,"dur":7,"args":{"any":[1]}}
],"more":{}}`

func TestTraceJoinsBothSides(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	must.Get(z.Write([]byte(bazelProfile)))(t)
	must.Succeed(t, z.Close())
	for name, profile := range map[string]string{"plain": bazelProfile, "gzip": packed.String()} {
		tr, problem := written(t, profile, zero.Add(time.Hour), executed(7, zero.Add(10*time.Second), "w"))
		expect.Equal(t, problem, "", "%s: problem", name)
		expect.Equal(t, tr.Tool["build_id"], any("x"), "%s: otherData", name)
		var got []string
		for _, e := range tr.Events {
			if e.Phase != "M" {
				got = append(got, strings.Join([]string{e.Phase, e.Name, time.Duration(e.Begin * 1000).String(), time.Duration(e.Duration * 1000).String()}, " "))
			}
		}
		expect.Slices(t, got, []string{
			"X evaluate 5µs 7µs", "b Cpp //a:b 0s 0s", "e Cpp //a:b 1s 0s", "X Cpp //a:b 1s 9s", "X prepare 1s 2s", "X run 3s 3s", "X store 6s 4s",
		}, "%s: events", name)
	}
}

// TestTraceOfTheServerAlone begins with the build, or with its first action if the beginning is unknown.
func TestTraceOfTheServerAlone(t *testing.T) {
	for started, want := range map[time.Time]float64{zero.Add(-time.Second): 1e6, {}: 0} {
		tr, _ := written(t, "", started, executed(1, zero.Add(10*time.Second), "w"), executed(2, zero.Add(12*time.Second), "w"),
			executed(3, zero.Add(19*time.Second), "w"), executed(4, zero.Add(10*time.Second), "v"))
		lanes, first := map[int][]int{}, 1e18
		for _, e := range tr.Events {
			if e.Category == "action" {
				lanes[e.Process] = append(lanes[e.Process], e.Lane)
			}
			if e.Phase == "b" {
				first = min(first, e.Begin)
			}
		}
		expect.Equal(t, first, want, "begin")
		expect.Slices(t, lanes[queueProcess+1], []int{0}, "lanes of v")
		expect.Slices(t, lanes[queueProcess+2], []int{0, 1, 0}, "lanes of w: the first two overlap")
	}
	empty, _ := written(t, "", time.Time{})
	expect.Equal(t, len(empty.Events), 1, "events without any action: the name of the queue")
}

// TestTraceHasStagesThatTookNoTime: a command may end before its start is read from the clock. An action that did not
// run has no stages.
func TestTraceHasStagesThatTookNoTime(t *testing.T) {
	short, never := executed(1, zero.Add(10*time.Second), "w"), executed(2, zero.Add(10*time.Second), "w")
	short.Ran = nil
	never.Prepared, never.Ran, never.Stored = nil, nil, nil
	tr, _ := written(t, "", zero, short, never)
	var got []string
	for _, e := range tr.Events {
		if e.Category == "stage" {
			got = append(got, fmt.Sprint(e.Name, " ", e.Begin/1e6, " ", e.Duration/1e6))
		}
	}
	expect.Slices(t, got, []string{"prepare 4 2", "run 6 0", "store 6 4"})
}

// TestDamagedProfiles: a trace has what precedes the damage, and everything of the server.
func TestDamagedProfiles(t *testing.T) {
	event := `{"name":"x","ph":"X","ts":1}`
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	must.Get(z.Write([]byte(`{"traceEvents":[` + event)))(t)
	blank := bytes.Repeat([]byte(" "), 1<<20)
	for range 4 {
		must.Get(z.Write(blank))(t)
	}
	must.Succeed(t, z.Close())
	for name, c := range map[string]struct {
		profile, problem string
		events           int
	}{
		"empty":           {" ", "EOF", 0},
		"other":           {"<html>", "invalid character", 0},
		"array":           {"[]", "in place of {", 0},
		"gzip":            {"\x1f\x8brubbish, which is no gzip stream", "gzip: invalid header", 0},
		"no array":        {`{"traceEvents":{}}`, "in place of [", 0},
		"cut":             {`{"traceEvents":[` + event + "," + event + `,{"na`, "EOF", 2},
		"values":          {`{"traceEvents":[1,"x",null,[` + event + `],` + event + `]}`, "", 1},
		"escape":          {`{"traceEvents":[` + event + `]],"cloister":{}}`, "invalid character", 1},
		"not UTF-8":       {`{"traceEvents":[{"name":"` + "\xff\xfe" + `"}]}`, "", 1},
		"nested":          {`{"traceEvents":[` + event + `,` + strings.Repeat("[", 20_000) + `]}`, "exceeded max depth", 1},
		"long":            {`{"traceEvents":[` + event + `,{"name":"` + strings.Repeat("x", 2<<20) + `"}]}`, "exceeds a limit", 1},
		"long name":       {`{"` + strings.Repeat("x", 2<<20) + `":1}`, "exceeds a limit", 0},
		"blanks":          {bomb.String(), "exceeds a limit", 1},
		"other otherData": {`{"otherData":[1],"traceEvents":[` + event + `]}`, "", 1},
		"hostile start":   {`{"otherData":{"profile_start_ts":-9223372036854775808},"traceEvents":[` + event + `]}`, "", 1},
	} {
		tr, problem := written(t, c.profile, zero, executed(1, zero.Add(time.Minute), "w"))
		bazel := 0
		for _, e := range tr.Events {
			if e.Process == 0 {
				bazel++
			}
		}
		expect.Equal(t, bazel, c.events, "%s: events of the profile", name)
		expect.That(t, len(tr.Events) > c.events+5, "%s: the server's part is missing", name)
		expect.That(t, strings.Contains(problem, c.problem) && (problem == "") == (c.problem == ""), "%s: problem %q, want %q", name, problem, c.problem)
	}
}

// TestProfilesHaveALimit as a whole, too.
func TestProfilesHaveALimit(t *testing.T) {
	r := &valueReader{in: strings.NewReader(strings.Repeat("x", 100)), left: 10}
	r.next()
	text, err := io.ReadAll(r)
	expect.That(t, len(text) == 10 && err != nil, "read %d bytes: %v", len(text), err)
}

type fullDisk struct{ left int }

func (f *fullDisk) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, errors.New("full")
	}
	return len(p), nil
}

func TestTraceReportsFailedWrites(t *testing.T) {
	profile := `{"traceEvents":[` + strings.Repeat(`{"name":"x"},`, 100_000) + `{}]}`
	for _, left := range []int{0, 100, 8192} {
		_, err := writeTrace(&fullDisk{left}, strings.NewReader(profile), zero, nil, map[string]any{})
		expect.Message(t, err, "full")
	}
}
