// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"debug/elf"
	"slices"
	"strings"
	"testing"
)

func TestTextNamesLinesAndCauses(t *testing.T) {
	for _, row := range []struct {
		name, a, b string
		want       []string // what, cause
	}{
		{"changed line", "one\ntwo\nthree\n", "one\n2\nthree\n", []string{"line 2: "}},
		{"added line", "one\nthree\n", "one\ntwo\nthree\n", []string{"line 2 of the second only: "}},
		{"removed line", "one\ntwo\nthree\n", "one\nthree\n", []string{"line 2 of the first only: "}},
		{"two causes in a line", "x\npid 12 on 2026-01-01\n", "x\npid 13 on 2026-01-02\n", []string{"line 2: process id", "line 2: timestamp"}},
		{"lines moved", "job 1 done\njob 2 done\njob 3 done\n", "job 2 done\njob 1 done\njob 3 done\n", []string{"order of lines, from line 1: parallel"}},
		{
			"lines moved, with times", "start 12:00:01\nB.c done 12:00:02\nA.c done 12:00:02\n", "start 13:00:01\nA.c done 13:00:02\nB.c done 13:00:03\n",
			[]string{"order of lines, from line 2: parallel", "line 1: timestamp", "line 3: timestamp"},
		},
		{"sorted differently", "Beta\nalpha\ngamma\n", "alpha\nBeta\ngamma\n", []string{"order of lines, from line 1: locale"}},
		{"files", "b.c\na.c\n", "a.c\nb.c\n", []string{"order of lines, from line 1: member order"}},
		{
			"a list whose last item has no comma", "[\n'b' => 1,\n'a' => 2,\n'c' => 3\n]\n", "[\n'c' => 3,\n'b' => 1,\n'a' => 2\n]\n",
			[]string{"order of lines, from line 2: hash seed"},
		},
		{"no newline at the end", "a\nb", "a\nb\n", []string{"line 2: "}},
		{
			"many of one cause", strings.Repeat("at 12:00:00\n", 10), strings.Repeat("at 13:00:00\n", 10),
			[]string{"line 1: timestamp", "line 2: timestamp", "line 3: timestamp", "7 more lines: timestamp"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			var got []string
			for _, d := range blobs(t, "x.txt", row.a, row.b, Known{}) {
				got = append(got, d.What+": "+string(d.Cause))
			}
			if !slices.Equal(got, row.want) {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

// A number that equals a fact by chance must not separate lines that belong together.
func TestTextFindsMovedLines(t *testing.T) {
	a := "-rw-r--r-- 1 builder 12 Nov 22 00:44 a\n-rw-r--r-- 1 builder 12 Nov 22 00:44 b\n"
	b := "-rw------- 1 alice 12 Dec 27 14:44 b\n-rw------- 1 alice 12 Dec 27 14:44 a\n"
	ds := blobs(t, "x", a, b, knownRuns())
	if len(ds) == 0 || !strings.HasPrefix(ds[0].What, "order of lines") {
		t.Errorf("got %q", summaries(ds))
	}
}

func TestTextReportsTheOffset(t *testing.T) {
	same := strings.Repeat("a line that is the same\n", 5000)
	ds := blobs(t, "x", same+"built by A\n"+same, same+"built by B\n"+same, Known{})
	if len(ds) != 1 || ds[0].What != "line 5001" || ds[0].Offset != int64(len(same)+9) {
		t.Errorf("got %+v", ds)
	}
	long := strings.Repeat("word ", 2000)
	ds = blobs(t, "x", long+"A"+long, long+"B"+long, Known{})
	if len(ds) != 1 || ds[0].Offset != int64(len(long)) || !strings.Contains(ds[0].A, "word Aword") {
		t.Errorf("got %+v", ds)
	}
}

// A listing of inputs shows their times and owner.
func TestListingsShowTimesAndOwners(t *testing.T) {
	k := Known{&Facts{InputOwner: 65534}, &Facts{InputOwner: 30001}}
	const usual, varied = "-rw-r--r-- 1 nobody nogroup 6 Sep  9  2001 alpha\n", "-rw-r--r-- 1 30001  30001   6 Jan  2  2002 alpha\n"
	var got []Cause
	for _, d := range blobs(t, "x", usual, varied, k) {
		got = append(got, d.Cause)
	}
	if !slices.Equal(got, []Cause{Owner, Timestamp}) {
		t.Errorf("got %q", got)
	}
}

// A text in a file of any kind shows all its causes, not only the first.
func TestTextsShowAllTheirCauses(t *testing.T) {
	k := Known{&Facts{Hostname: "one-host", User: "alice", UID: 1}, &Facts{Hostname: "other", User: "bob", UID: 2}}
	banner := func(f *Facts, day string) string {
		return "built on " + f.Hostname + " by " + f.User + " at " + day + " 12:00:00"
	}
	a, b := banner(k.A, "2026-11-22"), banner(k.B, "2027-12-23")
	for name, in := range map[string]func(text string) string{
		"text":   func(text string) string { return text + "\n" },
		"JSON":   func(text string) string { return `{"built": "` + text + `"}` },
		"binary": func(text string) string { return "\x00\x01\x02" + text + "\x00\x03" },
		"program": func(text string) string {
			return elfOf(nil, elfPart{name: ".rodata", typ: elf.SHT_PROGBITS, data: text + "\x00"})
		},
	} {
		var got []Cause
		ds := blobs(t, "x", in(a), in(b), k)
		for _, d := range ds {
			got = append(got, d.Cause)
		}
		for _, want := range []Cause{Hostname, Owner, Timestamp} {
			if !slices.Contains(got, want) {
				t.Errorf("%s: got %q without %s: %q", name, got, want, summaries(ds))
			}
		}
	}
}
