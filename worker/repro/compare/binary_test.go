// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// A summary is what a test expects of the first difference.
type summary struct {
	where, what, a, b string
	cause             Cause
}

// expect checks the first difference of a and b, and that no other has a different cause.
func expect(t *testing.T, name, a, b string, k Known, want summary) {
	t.Helper()
	ds := blobs(t, name, a, b, k)
	if len(ds) == 0 {
		t.Fatal("no difference")
	}
	if got := (summary{where(&ds[0]), ds[0].What, ds[0].A, ds[0].B, ds[0].Cause}); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, d := range ds {
		if d.Cause != want.cause && d.Cause != Unknown {
			t.Errorf("%s %q: cause %q beside %q", where(&d), d.What, d.Cause, want.cause)
		}
	}
	if t.Failed() {
		dump(t, ds)
	}
}

func deflated(s string) string {
	var b bytes.Buffer
	z := zlib.NewWriter(&b)
	z.Write([]byte(s))
	z.Close()
	return b.String()
}

func TestPycNamesTheHeaderAndTheTexts(t *testing.T) {
	t.Parallel()
	const script = `touch -d @$TIME a.py; python3 -c "import py_compile as p; p.compile('a.py', cfile='out', dfile='$NAME')"`
	b := build{"python3", script, map[string]string{"a.py": "def f(v):\n    return v in {'alpha', 'beta', 'gamma'}\n"}}
	x, _ := b.run(t, "x", "TIME=1000000000", "NAME=/tmp/one/a.py", "SOURCE_DATE_EPOCH=")
	y, _ := b.run(t, "x", "TIME=1100000000", "NAME=/tmp/one/a.py", "SOURCE_DATE_EPOCH=")
	z, _ := b.run(t, "x", "TIME=1000000000", "NAME=/tmp/other/a.py", "SOURCE_DATE_EPOCH=")
	if !isPyc([]byte(x), "") {
		sandboxtest.Unavailable(t, "python", "this one compiles to another form")
	}
	expect(t, "x.pyc", x, y, Known{}, summary{"", "time of the source", "2001-09-09T01:46:40Z", "2004-11-09T11:33:20Z", Timestamp})
	expect(t, "x.pyc", x, z, Known{}, summary{"code", "text", "/tmp/one/a.py", "/tmp/other/a.py", Path})

	head := "\xa7\r\r\n\x01\x00\x00\x00hashhash"
	expect(t, "x.pyc", head+">\x02\x00\x00\x00z\x05alphaz\x04beta", head+">\x02\x00\x00\x00z\x04betaz\x05alpha", Known{},
		summary{"code", "order of constants", "alpha", "beta", HashSeed})
	expect(t, "x.pyc", head+"(\x01\x00\x00\x00Z\x05alpha", head+"(\x01\x00\x00\x00\xda\x05alpha", Known{},
		summary{"code", "marks of objects that are referred to", "5a05616c 706861  Z.alpha", "da05616c 706861  ..alpha", Unknown})
}

func TestGoObjectNamesTheText(t *testing.T) {
	t.Parallel()
	b := build{"go", "go tool compile -p main -o a.a $PWD/a.go; ar p a.a _go_.o > out", map[string]string{"a.go": "package main\n\nfunc main() { panic(1) }\n"}}
	x, factsX := b.run(t, "one")
	y, factsY := b.run(t, "other")
	ds := blobs(t, "_go_.o", x, y, Known{factsX, factsY})
	if len(ds) == 0 || ds[0].What != "text" || ds[0].Cause != Path {
		dump(t, ds)
		t.Errorf("got %+v", ds)
	}
}

// machoOf returns a Mach-O file with a UUID and a section of texts.
func machoOf(uuid, text string) string {
	le := binary.LittleEndian
	segment := append(le.AppendUint32(le.AppendUint32(nil, 0x19), 72+80), make([]byte, 64)...)
	sect := append([]byte("__cstring\x00\x00\x00\x00\x00\x00\x00__TEXT\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), make([]byte, 8)...)
	sect = le.AppendUint32(le.AppendUint64(sect, uint64(len(text))), 32+72+80+24)
	segment = append(append(segment, sect...), make([]byte, 80-len(sect))...)
	id := append(le.AppendUint32(le.AppendUint32(nil, machoUUID), 24), uuid...)
	head := append(le.AppendUint32(nil, 0xfeedfacf), make([]byte, 12)...)
	head = append(le.AppendUint32(le.AppendUint32(head, 2), uint32(len(segment)+len(id))), make([]byte, 8)...)
	return string(head) + string(segment) + string(id) + text
}

func TestMachONamesTheSection(t *testing.T) {
	const u, v = "0123456789abcdef", "fedcba9876543210"
	expect(t, "a", machoOf(u, "in /tmp/one/a\x00"), machoOf(v, "in /tmp/two/a\x00"), Known{},
		summary{"__TEXT,__cstring", "content", "696e202f 746d702f 6f6e652f 6100  in /tmp/one/a.", "696e202f 746d702f 74776f2f 6100  in /tmp/two/a.", Path})
	expect(t, "a", machoOf(u, "same\x00"), machoOf(v, "same\x00"), Known{},
		summary{"", "LC_UUID", fmt.Sprintf("%x", u), fmt.Sprintf("%x", v), BuildID})
}

// Formats that are compared as bytes have a cause only if it shows, but their own fixes.
func TestFormatsComparedAsBytes(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	noise := func(n int) string { return randomString(r, n) }
	const gray = "\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x28\x00\x00\x00\x28\x08\x02\x00\x00\x00"
	dated := func(day string) string {
		return gray + noise(4) + "\x00\x00\x00\x25tEXtdate:create\x002026-11-" + day + "T01:02:03+00:00" + noise(4) +
			"\x00\x00\x10\x00IDAT" + noise(4096)
	}
	pdf := func(date, path string) string {
		return "%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<</Producer(x 1.0)/CreationDate(D:" + date + ")>>\nendobj\n" +
			"2 0 obj\n<</Filter/FlateDecode>>\nstream\n" + deflated(noise(300)) + "\nendstream\n3 0 obj\n(" + path + ")\n"
	}
	stamped := func(stamp uint32, rest string) string {
		return "MZ" + strings.Repeat("\x00", 58) + "\x40\x00\x00\x00PE\x00\x00\x64\x86\x01\x00" +
			string(binary.LittleEndian.AppendUint32(nil, stamp)) + strings.Repeat("\x00", 64) + rest
	}
	class := func(constant, code string) string {
		return "\xca\xfe\xba\xbe\x00\x00\x00\x41\x00\x05\x01\x00\x19" + constant + "\x07\x00\x01" + code
	}
	const words = "words in data, of no "
	for _, row := range []struct {
		name, a, b string
		format     string
		causes     []Cause
	}{
		{"date in an image", dated("22"), dated("23"), "png", []Cause{Unknown, Timestamp}},
		{"another image", gray + noise(4096), gray + noise(4096), "png", []Cause{Unknown}},
		{"another image of another size", gray + noise(4096), gray + noise(4090), "png", []Cause{Unknown}},
		{"date", pdf("20261122010203Z", ""), pdf("20261123040506Z", ""), "pdf", []Cause{Timestamp}},
		{
			"date and path", pdf("20261122010203Z", "/tmp/build-1/x"), pdf("20261123040506Z", "/tmp/build-22/x"), "pdf",
			[]Cause{Timestamp, Path},
		},
		{"time", stamped(1_763_772_001, ""), stamped(1_763_779_202, ""), "pe", []Cause{Timestamp}},
		{"hash instead of a time", stamped(0x9ab31c07, ""), stamped(0x3f02d8e1, ""), "pe", []Cause{Unknown}},
		{"__DATE__", stamped(0, "Nov 22 2026\x00"), stamped(0, "Nov 23 2026\x00"), "pe", []Cause{BuildDate}},
		{"__DATE__ and __TIME__", stamped(0, "Nov 22 2026 23:19:21\x00"), stamped(0, "Nov 23 2026 02:32:50\x00"), "pe", []Cause{BuildDate}},
		{"words", stamped(0, words+"time"), stamped(0, words+"date"), "pe", []Cause{Unknown}},
		{"constant", class("built 2026-11-22 01:02:03", ""), class("built 2026-11-23 04:05:06", ""), "class", []Cause{Timestamp}},
		{
			"code that looks like a time", class("", "\x00\x00\x00\x69\x21\x07\xa1\x00"),
			class("", "\x00\x00\x00\x69\x22\x08\xa2\x00"), "class",
			[]Cause{Unknown},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			ds := blobs(t, "x", row.a, row.b, Known{})
			var causes []Cause
			for _, d := range ds {
				causes = append(causes, d.Cause)
				if !strings.HasPrefix(d.What, "content") || d.Fix != FixFor(d.Cause, row.format) {
					t.Errorf("got %q with the fix %q", d.What, d.Fix)
				}
			}
			if !slices.Equal(causes, row.causes) {
				dump(t, ds)
				t.Errorf("got causes %q, want %q", causes, row.causes)
			}
		})
	}
}

// The fix of an archive does not fit a member without a format.
func TestMembersHaveTheirOwnFixes(t *testing.T) {
	packed := func(stamp uint32) string {
		return arMagic + fmt.Sprintf("%-16s%-12d%-6d%-6d%-8o%-10d`\n", "x/", 0, 0, 0, 0o644, 8) +
			string(binary.LittleEndian.AppendUint32([]byte("\x00\x01\x02\x03"), stamp))
	}
	ds := blobs(t, "x.a", packed(1_763_772_001), packed(1_763_779_202), Known{})
	if len(ds) != 1 || ds[0].Cause != Timestamp || ds[0].Fix != FixFor(Timestamp, "") {
		t.Errorf("got %+v", ds)
	}
}
