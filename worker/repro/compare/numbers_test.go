// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func randomString(r *rand.Rand, n int) string {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return string(p)
}

func TestNumbersNamesTheCause(t *testing.T) {
	le32 := func(v uint32) string { return string(binary.LittleEndian.AppendUint32(nil, v)) }
	be32 := func(v uint32) string { return string(binary.BigEndian.AppendUint32(nil, v)) }
	le64 := func(v uint64) string { return string(binary.LittleEndian.AppendUint64(nil, v)) }
	be64 := func(v uint64) string { return string(binary.BigEndian.AppendUint64(nil, v)) }
	noise := func(seed uint64, n int) string { return randomString(rand.New(rand.NewPCG(seed, 1)), n) }
	start := time.Unix(1_763_772_000, 0)
	ran := Known{&Facts{Start: start, End: start.Add(time.Second), UID: 1000, InputOwner: 65534}, &Facts{Start: start.Add(time.Hour), End: start.Add(time.Hour), UID: 4_001, InputOwner: 30_001}}
	held := Known{&Facts{HeldRandom: true, FixedLayout: true}, &Facts{HeldRandom: true, FixedLayout: true}}
	s, u := uint32(start.Unix()), uint32(start.Unix()+3600)
	frame := func(x string) string { return "head\x00\x00\x00\x00" + x + "\x00\x00\x00\x00" }
	for _, row := range []struct {
		name, a, b string
		k          Known
		want       Cause
	}{
		{"seconds of the runs", le32(s), le32(u), ran, Timestamp},
		{"seconds, big endian", be32(s), be32(u), ran, Timestamp},
		{"seconds in 8 bytes", be64(uint64(s)), be64(uint64(u)), ran, Timestamp},
		{"milliseconds", le64(uint64(s) * 1000), le64(uint64(u) * 1000), ran, Timestamp},
		{"nanoseconds", le64(uint64(s)*1e9 + 5), le64(uint64(u)*1e9 + 7), ran, Timestamp},
		{"seconds as a fraction", le64(math.Float64bits(float64(s) + .25)), le64(math.Float64bits(float64(u) + .5)), ran, Timestamp},
		{"unaligned", "x" + le32(s), "x" + le32(u), ran, Timestamp},
		{"seconds of other runs", le32(s + 1e5), le32(u + 2e5), ran, Unknown},
		{"seconds, nothing known", le32(s), le32(u), Known{}, Timestamp},
		{"small numbers, nothing known", le32(17), le32(18), Known{}, Unknown},
		{"a flag, nothing known", le64(0x1500_0000_0000_1234), le64(0x1500_0000_0000_1235), Known{}, Unknown},
		{"years apart, nothing known", le32(s), le32(s + 1_000_000_128), Known{}, Unknown},
		{"a mapping", le64(0x7f12_3456_7000), le64(0x7ffe_0123_4000), ran, Address},
		{"a program", le64(0x5581_2345_6010), le64(0x560a_0123_4010), Known{}, Address},
		{"arm64", le64(0xaaaa_e345_6010), le64(0xaaab_0123_4010), Known{}, Address},
		{"a fixed layout", le64(0x7f12_3456_7000), le64(0x7ffe_0123_4000), held, Unknown},
		{"a user", le32(1000), le32(4001), ran, Owner},
		{"an owner of inputs", le32(65534), le32(30001), ran, Owner},
		{"a user in two bytes", "\xe8\x03\x00\x00", "\xa1\x0f\x00\x00", ran, Owner},
		{"a time before another number", le32(s) + "\x77", le32(u) + "\x88", ran, Timestamp},
		{"another user", le32(1000), le32(4002), ran, Unknown},
		{"noise", noise(1, 32), noise(2, 32), ran, Random},
		{"much noise", noise(1, 100_000), noise(2, 100_000), ran, Random},
		{"little noise", noise(1, 8), noise(2, 8), ran, Random},
		{"noise that was held", noise(1, 32), noise(2, 32), held, Unknown},
		{"text", strings.Repeat("abc def ", 9), strings.Repeat("ihg zyx ", 9), ran, Unknown},
		{"numbers in a row", strings.Repeat("\x01\x00\x02\x00", 9), strings.Repeat("\x03\x10\x04\x10", 9), ran, Unknown},
		{"one longer", "abc" + le32(1), "abc", ran, Unknown},
		{"nothing", "", "", ran, Unknown},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, b := row.a, row.b
			if row.name != "one longer" {
				a, b = frame(a), frame(b)
			}
			if got := numbers([]byte(a), []byte(b), row.k); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

func TestNumbersFindsNoCauseInCounters(t *testing.T) {
	counts := func(step uint32) []byte {
		var p []byte
		for i := range uint32(2000) {
			p = binary.LittleEndian.AppendUint32(p, i*step)
		}
		return p
	}
	if got := numbers(counts(7), counts(8), Known{}); got != Unknown {
		t.Errorf("counting numbers: got %q", got)
	}
}

func TestContentsReportsTextsAndNumbers(t *testing.T) {
	c := newComparison(t.Context(), Known{}).within("x")
	a := "\x00\x01built in /tmp/one\x00\x02\x00\x00\x00\x00\x00\x00" + "\x10\x00\x00\x00same text\x00"
	b := "\x00\x01built in /tmp/two\x00\x02\x00\x00\x00\x00\x00\x00" + "\x20\x00\x00\x00same text\x00"
	c.contents([]byte(a), []byte(b), ".rodata")
	ds := c.found.all()
	checkDifferences(t, ds)
	if len(ds) != 2 || ds[0].What != "text" || ds[0].A != "built in /tmp/one" || ds[0].B != "built in /tmp/two" || ds[0].Offset != 16 ||
		ds[1].What != "bytes" || ds[1].Offset != 27 {
		t.Errorf("got %+v", ds)
	}
	// A table of offsets in front of the texts.
	x, y := []byte{}, []byte{}
	for i := range uint32(300) {
		x, y = binary.LittleEndian.AppendUint32(x, 5*i), binary.LittleEndian.AppendUint32(y, 5*i+2)
	}
	x, y = append(x, "/src/one/a.c\x00/src/b.c\x00\x00\x00"...), append(y, "/src/other/a.c\x00/src/b.c\x00"...)
	c = newComparison(t.Context(), Known{}).within("x")
	c.contents(x, y)
	if ds = c.found.all(); len(ds) != 1 || ds[0].A != "/src/one/a.c" || ds[0].B != "/src/other/a.c" || ds[0].Cause != Path {
		t.Errorf("got %+v", ds)
	}
	c = newComparison(t.Context(), Known{}).within("x")
	c.contents([]byte(a), []byte("\x00\x01built in /tmp/three\x00\x02\x00\x00\x00\x00\x00\x00same text\x00"))
	ds = c.found.all()
	checkDifferences(t, ds)
	if len(ds) != 1 || ds[0].A != "built in /tmp/one" || ds[0].B != "built in /tmp/three" || ds[0].Offset != 16 {
		t.Errorf("got %+v", ds)
	}
}

// Times in other notations than numbers of seconds, in any zone, are recognized if the time of the runs is known.
func TestNotationsOfTime(t *testing.T) {
	k := knownRuns()
	bcd := func(v int) byte { return byte(v/10<<4 | v%10) }
	for name, write := range map[string]func(t time.Time) []byte{
		"BCD": func(t time.Time) []byte {
			return []byte{bcd(t.Year() / 100), bcd(t.Year() % 100), bcd(int(t.Month())), bcd(t.Day()), bcd(t.Hour()), bcd(t.Minute()), bcd(t.Second())}
		},
		"BCD date": func(t time.Time) []byte {
			return []byte{bcd(t.Year() / 100), bcd(t.Year() % 100), bcd(int(t.Month())), bcd(t.Day())}
		},
		"DOS": func(t time.Time) []byte {
			p := binary.LittleEndian.AppendUint16(nil, uint16(t.Hour()<<11|t.Minute()<<5|t.Second()/2))
			return binary.LittleEndian.AppendUint16(p, uint16((t.Year()-1980)<<9|int(t.Month())<<5|t.Day()))
		},
		"ISO 9660": func(t time.Time) []byte {
			return []byte{byte(t.Year() - 1900), byte(t.Month()), byte(t.Day()), byte(t.Hour()), byte(t.Minute()), byte(t.Second()), 0}
		},
	} {
		of := func(at time.Time) string {
			return "\x00\x01\x02\x03\x00" + string(write(at)) + strings.Repeat("\x00\x01\x02\x03", 9)
		}
		a, b := k.A.Start.UTC(), k.B.Start.UTC()
		if ds := blobs(t, "x", of(a), of(b), k); len(ds) != 1 || ds[0].Cause != Timestamp {
			t.Errorf("%s: got %q", name, summaries(ds))
		}
		if ds := blobs(t, "x", of(a.AddDate(3, 0, 3)), of(b.AddDate(4, 3, 0)), k); len(ds) != 1 || ds[0].Cause == Timestamp {
			t.Errorf("%s of other days: got %q", name, summaries(ds))
		}
	}
}

// Random values behind a time are found, and long ranges of bytes that look random are not called random.
func TestRandomNeedsEvidence(t *testing.T) {
	k := knownRuns()
	r := rand.New(rand.NewPCG(7, 8))
	noise := func(n int) string { return randomString(r, n) }
	seconds := func(f *Facts) string { return string(binary.LittleEndian.AppendUint32(nil, uint32(f.Start.Unix()))) }
	filler := strings.Repeat("\x00\x01\x02\x03", 1000)
	for _, row := range []struct {
		name, a, b string
		want       []Cause
	}{
		{"an ID behind a time", filler + seconds(k.A) + filler + noise(16) + filler, filler + seconds(k.B) + filler + noise(16) + filler, []Cause{Timestamp, Random}},
		{"compressed data behind a time", filler + seconds(k.A) + filler + noise(900), filler + seconds(k.B) + filler + noise(900), []Cause{Timestamp}},
		{"compressed data", noise(2000), noise(2000), []Cause{Compressed}},
		{"of other length", noise(2000), noise(1900), []Cause{Compressed}},
		{"a key", noise(64), noise(64), []Cause{Random}},
	} {
		var got []Cause
		ds := blobs(t, "x", row.a, row.b, k)
		for _, d := range ds {
			got = append(got, d.Cause)
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s: got %q, want %q: %q", row.name, got, row.want, summaries(ds))
		}
	}
}

func TestUnknownFormatsHaveCauses(t *testing.T) {
	le := binary.LittleEndian
	for _, row := range []struct {
		name, a, b string
		want       Cause
	}{
		{"pointers", string(le.AppendUint64(nil, 0x7f12_3456_7000)), string(le.AppendUint64(nil, 0x7ffe_0123_4000)), Address},
		{"times", string(le.AppendUint32(nil, 1_763_772_001)), string(le.AppendUint32(nil, 1_763_779_202)), Timestamp},
		{"noise", "\x8e\x01\xc4\x99\x3f\xa2\x10\xee\x57\xb3", "\x13\xd7\x6a\xf0\x82\x1c\xbd\x45\xe9\x28", Random},
		{"words", "\x01in /tmp/one-1/x\x00", "\x01in /tmp/two-2/x\x00", Path},
	} {
		t.Run(row.name, func(t *testing.T) {
			ds := blobs(t, "x", "\x00\x01\x02\x03\x04\x05\x06\x07"+row.a+"\x00\x00", "\x00\x01\x02\x03\x04\x05\x06\x07"+row.b+"\x00\x00", Known{})
			if len(ds) != 1 || ds[0].Cause != row.want {
				t.Errorf("got %+v, want cause %q", ds, row.want)
			}
		})
	}
}

func TestUnknownFormatsHaveSeveralCauses(t *testing.T) {
	k := knownRuns()
	seconds := func(f *Facts) string { return string(binary.BigEndian.AppendUint32(nil, uint32(f.Start.Unix()))) }
	filler := strings.Repeat("\x01\x02\x03", 400)
	of := func(f *Facts, path string) string {
		return "\x00\x01\x02\x03" + seconds(f) + filler + path + "\x00" + filler
	}
	for _, row := range []struct {
		name, a, b string
		known      Known
		want       []Cause
	}{
		{"path of another length", of(k.A, "in /b/build/x"), of(k.B, "in /b/somewhere/else/x"), k, []Cause{Timestamp, Path}},
		{"of one length", of(k.A, "user 1000"), of(k.B, "user 2345"), k, []Cause{Timestamp, Owner}},
		{
			"variables", "\x00HOSTNAME=cloister\x00PAD=x\x00LANG=C\x00", "\x00HOSTNAME=host-b7\x00PAD=xxxxxxxxxx\x00LANG=de_DE.UTF-8\x00", k,
			[]Cause{Hostname, Environment, Locale},
		},
		{"one cause", of(k.A, "x"+seconds(k.A)), of(k.B, "x"+seconds(k.B)), k, []Cause{Timestamp}},
		{"a set, packed", "\x80\x05alpha\x94\x8c\x04beta\x94\x8c\x05gamma\x94.", "\x80\x04beta\x94\x8c\x05gamma\x94\x8c\x05alpha\x94.", Known{}, []Cause{HashSeed}},
		{"nothing known", "\x00one" + filler + "two\x00", "\x00six" + filler + "ten\x00", k, []Cause{Unknown}},
	} {
		t.Run(row.name, func(t *testing.T) {
			ds := blobs(t, "x", row.a, row.b, row.known)
			checkDifferences(t, ds)
			var got []Cause
			for _, d := range ds {
				got = append(got, d.Cause)
			}
			if !slices.Equal(got, row.want) {
				t.Errorf("got %q, want %q: %q", got, row.want, summaries(ds))
			}
		})
	}
}

func TestCompressedDataHasNoFurtherCause(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	noise := func() string { return "\xfd7zXZ\x00" + randomString(r, 1<<20) }
	for _, k := range []Known{{}, knownRuns()} {
		for _, tail := range []string{"", "\x00\x00\x00"} {
			if ds := blobs(t, "x.xz", noise(), noise()+tail, k); len(ds) != 1 {
				t.Errorf("got %q", summaries(ds))
			}
		}
	}
}
