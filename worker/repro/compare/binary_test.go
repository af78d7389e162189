// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"image/png"
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

func pngChunk(kind, data string) string {
	s := binary.BigEndian.AppendUint32(nil, uint32(len(data)))
	s = append(append(s, kind...), data...)
	return string(binary.BigEndian.AppendUint32(s, crc32.ChecksumIEEE(s[4:])))
}

// pngOf returns an image of one color with additional chunks.
func pngOf(t testing.TB, c color.Color, level png.CompressionLevel, chunks ...string) string {
	t.Helper()
	m := image.NewRGBA(image.Rect(0, 0, 40, 40))
	for i := range 1600 {
		m.Set(i%40, i/40, c)
	}
	var b bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: level}).Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	s, end, _ := strings.Cut(b.String(), "\x00\x00\x00\x00IEND")
	return s + strings.Join(chunks, "") + "\x00\x00\x00\x00IEND" + end
}

// cutImage splits the data of an image into two chunks.
func cutImage(s string) string {
	at := strings.Index(s, "IDAT")
	size := int(binary.BigEndian.Uint32([]byte(s[at-4:])))
	data := s[at+4 : at+4+size]
	return s[:at-4] + pngChunk("IDAT", data[:7]) + pngChunk("IDAT", data[7:]) + s[at+4+size+4:]
}

func deflated(s string) string {
	var b bytes.Buffer
	z := zlib.NewWriter(&b)
	z.Write([]byte(s))
	z.Close()
	return b.String()
}

func TestPNGNamesTheChunk(t *testing.T) {
	gray := func(chunks ...string) string { return pngOf(t, color.Gray{7}, png.DefaultCompression, chunks...) }
	tIME := func(day byte) string {
		return pngChunk("tIME", string([]byte{2026 >> 8, 2026 & 0xff, 11, day, 1, 2, 3}))
	}
	text := pngChunk("tEXt", "Title\x00same")
	for _, row := range []struct {
		name, a, b string
		want       summary
	}{
		{
			"time", gray(tIME(22)), gray(tIME(23)),
			summary{"tIME", "time", "2026-11-22 01:02:03 UTC", "2026-11-23 01:02:03 UTC", Timestamp},
		},
		{
			"date in a text", gray(pngChunk("tEXt", "date:create\x002026-11-22T01:02:03+00:00")), gray(pngChunk("tEXt", "date:create\x002026-11-23T01:02:03+00:00")),
			summary{"tEXt date:create", "text", "2026-11-22T01:02:03+00:00", "2026-11-23T01:02:03+00:00", Timestamp},
		},
		{
			"packed text", gray(pngChunk("zTXt", "Comment\x00\x00"+deflated("in /tmp/build-1/x"))), gray(pngChunk("zTXt", "Comment\x00\x00"+deflated("in /tmp/build-2/x"))),
			summary{"zTXt Comment", "text", "in /tmp/build-1/x", "in /tmp/build-2/x", Path},
		},
		{
			"international text", gray(pngChunk("iTXt", "Comment\x00\x01\x00de\x00Wort\x00"+deflated("eins"))), gray(pngChunk("iTXt", "Comment\x00\x01\x00de\x00Wort\x00"+deflated("zwei"))),
			summary{"iTXt Comment", "text", "eins", "zwei", Unknown},
		},
		{"order", gray(text, tIME(1)), gray(tIME(1), text), summary{"", "order of chunks", "tEXt Title", "tIME", MemberOrder}},
		{"additional chunk", gray(text), gray(), summary{"", "chunk", "tEXt Title", "", Unknown}},
		{"the same image in two chunks", gray(text), cutImage(gray(text)), summary{"IDAT", "compression of the image", "", "", Unknown}},
		{
			"the same image, compressed differently", gray(text), pngOf(t, color.Gray{7}, png.BestSpeed, text),
			summary{"IDAT", "compression of the image", "", "", Unknown},
		},
	} {
		t.Run(row.name, func(t *testing.T) { expect(t, "x.png", row.a, row.b, Known{}, row.want) })
	}
	ds := blobs(t, "x.png", gray(), pngOf(t, color.Gray{8}, png.DefaultCompression), Known{})
	if len(ds) == 0 || where(&ds[0]) != "image data, unpacked" || ds[0].Offset < 0 {
		t.Errorf("another image: got %+v", ds)
	}
}

// pdfOf returns a PDF file with one page.
func pdfOf(info, id, content, filter string) string {
	var b strings.Builder
	b.WriteString("%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
	var places []int
	for i, object := range []string{
		"<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>", "<</Type/Page/Parent 2 0 R/Contents 4 0 R>>",
		fmt.Sprintf("<</Length %d%s>>\nstream\n%s\nendstream", len(content), filter, content), "<<" + info + ">>",
	} {
		places = append(places, b.Len())
		fmt.Fprintf(&b, "%d 0 obj\n%s\nendobj\n", i+1, object)
	}
	start := b.Len()
	fmt.Fprintf(&b, "xref\n0 6\n0000000000 65535 f \n")
	for _, at := range places {
		fmt.Fprintf(&b, "%010d 00000 n \n", at)
	}
	fmt.Fprintf(&b, "trailer\n<</Size 6/Root 1 0 R/Info 5 0 R/ID[<%s><%s>]>>\nstartxref\n%d\n%%%%EOF\n", id, id, start)
	return b.String()
}

func TestPDFNamesTheEntry(t *testing.T) {
	const info, page, packed = "/Producer(x 1.0)/CreationDate(D:20261122010203Z)", "BT (some words) Tj ET", "/Filter/FlateDecode"
	a := pdfOf(info, "00ff", page, "")
	for _, row := range []struct {
		name, a, b string
		want       summary
	}{
		{
			"date", a, pdfOf("/Producer(x 1.0)/CreationDate(D:20261123040506Z)", "11ee", page, ""),
			summary{"object 5 0", "/CreationDate", "(D:20261122010203Z)", "(D:20261123040506Z)", Timestamp},
		},
		{
			"version of the tool", a, pdfOf("/Producer(x 1.10)/CreationDate(D:20261122010203Z)", "11ee", page, ""),
			summary{"object 5 0", "/Producer", "(x 1.0)", "(x 1.10)", Unknown},
		},
		{
			"a name", a, pdfOf(info+"/Trapped/True", "00ff", page, ""),
			summary{"object 5 0", "text", "<</Producer(x 1.0)/CreationDate(D:20261122010203Z)>>", "<</Producer(x 1.0)/CreationDate(D:20261122010203Z)/Trapped/True>>", Unknown},
		},
		{"identity", a, pdfOf(info, "11ee", page, ""), summary{"trailer", "/ID", "[<00ff><00ff>]", "[<11ee><11ee>]", BuildID}},
		{
			"words, packed", pdfOf(info, "00ff", deflated("BT (made in /tmp/a-1/x) Tj ET"), packed), pdfOf(info, "00ff", deflated("BT (made in /tmp/a-22/x) Tj ET"), packed),
			summary{"object 4 0/stream", "line 1", "BT (made in /tmp/a-1/x) Tj ET", "BT (made in /tmp/a-22/x) Tj ET", Path},
		},
		{
			"metadata", pdfOf(info, "0", "<x><xmp:CreateDate>2026-11-22T01:02:03Z</xmp:CreateDate></x>", ""),
			pdfOf(info, "0", "<x><xmp:CreateDate>2026-11-23T01:02:04Z</xmp:CreateDate></x>", ""),
			summary{"object 4 0", "xmp:CreateDate", "2026-11-22T01:02:03Z", "2026-11-23T01:02:04Z", Timestamp},
		},
	} {
		t.Run(row.name, func(t *testing.T) { expect(t, "x.pdf", row.a, row.b, Known{}, row.want) })
	}
	ds := blobs(t, "x.pdf", a, pdfOf("/Producer(x 1.0)/CreationDate(D:20261123040506Z)", "11ee", page, ""), Known{})
	if last := ds[len(ds)-1]; len(ds) != 2 || !strings.Contains(last.What, "follows") || last.Cause != Timestamp {
		t.Errorf("the identity of a file with another date: got %+v", ds)
	}
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

func TestClassNamesTheConstant(t *testing.T) {
	t.Parallel()
	b := build{
		"javac", `sed "s/WHEN/$WHEN/" A.txt > A.java; ` +
			`javac -J-Xshare:auto -J-XX:TieredStopAtLevel=1 A.java; mv A.class out`,
		map[string]string{"A.txt": "class A { String s = \"built WHEN\"; long n = 12345678901L; }\n"},
	}
	x, _ := b.run(t, "x", "WHEN=2026-11-22 01:02:03")
	y, _ := b.run(t, "x", "WHEN=2026-11-23 04:05:06")
	expect(t, "A.class", x, y, Known{},
		summary{"constants", "constant", "built 2026-11-22 01:02:03", "built 2026-11-23 04:05:06", Timestamp})
	expect(t, "A.class", x, x[:7]+"\x37"+x[8:], Known{},
		summary{"", "version of the format", fmt.Sprint(x[7], ".0"), "55.0", Unknown})
	at := len(x) - 1
	ds := blobs(t, "A.class", x, x[:at]+"\x7f", Known{})
	if len(ds) != 1 || where(&ds[0]) != "fields, methods and attributes" {
		t.Errorf("got %+v", ds)
	}
	reordered := strings.Replace(strings.Replace(x, "\x01\x00\x04Code", "\x01\x00\x04LINE", 1), "LINE", "edoC", 1)
	if ds := blobs(t, "A.class", x, reordered, Known{}); len(ds) == 0 || ds[0].A != "Code" || ds[0].B != "edoC" {
		t.Errorf("got %+v", ds)
	}
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

func TestPENamesTheTimeAndTheSection(t *testing.T) {
	t.Parallel()
	b := build{
		"objcopy", "gcc -c -fno-asynchronous-unwind-tables -o a.o a.c; objcopy -O pe-x86-64 a.o a.obj; " +
			"ld -m i386pep --insert-timestamp -e start -o out a.obj 2>/dev/null",
		map[string]string{"a.c": "int start(void) { return 1; }\nconst char words[] = \"words in data, of no time\";\n"},
	}
	x, _ := b.run(t, "x")
	at := int(binary.LittleEndian.Uint32([]byte(x[60:]))) + peStamp
	stamped := func(v uint32) string {
		return x[:at] + string(binary.LittleEndian.AppendUint32(nil, v)) + x[at+4:]
	}
	expect(t, "a.exe", stamped(1_763_772_001), stamped(1_763_779_202), Known{},
		summary{"header", "TimeDateStamp", "2025-11-22T00:40:01Z", "2025-11-22T02:40:02Z", Timestamp})
	expect(t, "a.exe", stamped(0x12345678), stamped(0xf2345678), Known{},
		summary{"header", "TimeDateStamp, a hash", "78563412", "785634f2", BuildID})
	expect(t, "a.exe", x, strings.Replace(x, "of no time", "of no date", 1), Known{},
		summary{".rodata", "text", "words in data, of no time", "words in data, of no date", Unknown})
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
		summary{"__TEXT,__cstring", "text", "in /tmp/one/a", "in /tmp/two/a", Path})
	expect(t, "a", machoOf(u, "same\x00"), machoOf(v, "same\x00"), Known{},
		summary{"", "LC_UUID", fmt.Sprintf("%x", u), fmt.Sprintf("%x", v), BuildID})
}
