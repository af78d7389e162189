// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
	"github.com/klauspost/compress/zstd"
)

func gzipped(t testing.TB, data []byte) string {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	must.Succeed(t, w.Close())
	return out.String()
}

func zipped(t testing.TB, names ...string) string {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, name := range names {
		f, err := w.Create(name)
		if err == nil {
			_, err = f.Write([]byte(name + " is its content"))
		}
		must.Succeed(t, err)
	}
	must.Succeed(t, w.Close())
	return out.String()
}

func tarred(t testing.TB, names ...string) string {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range names {
		content := name + " is its content"
		must.Succeed(t, w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}))
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	must.Succeed(t, w.Close())
	return out.String()
}

func arred(names ...string) string {
	out := arMagic
	for _, name := range names {
		content := name + " is its content"
		out += fmt.Sprintf("%-16.16s%-12d%-6d%-6d%-8o%-10d`\n%s", name+"/", 0, 0, 0, 0o644, len(content), content)
		if len(content)%2 == 1 {
			out += "\n"
		}
	}
	return out
}

func TestBombsAreNotUnpacked(t *testing.T) {
	zeros := make([]byte, 8<<20) // from a few KiB
	bomb := func(pack func(io.Writer) io.WriteCloser, last byte) string {
		var out bytes.Buffer
		w := pack(&out)
		if _, err := w.Write(append(slices.Clip(zeros), last, last)); err != nil {
			t.Fatal(err)
		}
		must.Succeed(t, w.Close())
		return out.String()
	}
	zst := func(w io.Writer) io.WriteCloser {
		e := must.Get(zstd.NewWriter(w, zstd.WithEncoderConcurrency(1)))(t)
		return e
	}
	for _, row := range []struct {
		name string
		pack func(io.Writer) io.WriteCloser
	}{{"gzip", func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) }}, {"zstd", zst}} {
		t.Run(row.name, func(t *testing.T) {
			a, b := bomb(row.pack, 1), bomb(row.pack, 2)
			ds := blobs(t, "x", a, b, Known{})
			if len(ds) != 1 || !strings.Contains(ds[0].What, errTooMuch.Error()) {
				t.Errorf("got %+v", ds)
			}
		})
	}
}

func TestUnpackLimitsSizeRatioAndBudget(t *testing.T) {
	c := newComparison(t.Context(), Known{})
	if _, _, err := c.unpack(bytes.NewReader(make([]byte, 1<<20+2*maxRatio+1)), 2); !errors.Is(err, errTooMuch) {
		t.Errorf("high ratio: got %v", err)
	}
	if _, _, err := c.unpack(endless{}, 1<<40); !errors.Is(err, errTooMuch) || c.budget.work < maxWork-maxUnpacked-2<<20 {
		t.Errorf("endless input: got %v, with %d bytes of work left", err, c.budget.work)
	}
	c = newComparison(t.Context(), Known{})
	c.budget.live = 10
	_, release, err := c.unpack(strings.NewReader("12345678"), 100)
	must.Succeed(t, err)
	if _, _, err := c.unpack(strings.NewReader("123"), 100); !errors.Is(err, errTooMuch) {
		t.Errorf("8 of 10 live bytes in use: got %v", err)
	}
	release()
	if _, _, err := c.unpack(strings.NewReader("123"), 100); err != nil {
		t.Errorf("after release: got %v", err)
	}
	c = newComparison(t.Context(), Known{})
	c.budget.work = 10
	if _, release, err = c.unpack(strings.NewReader("12345678"), 100); err != nil {
		t.Fatal(err)
	}
	release()
	if _, _, err := c.unpack(strings.NewReader("123"), 100); !errors.Is(err, errTooMuch) {
		t.Errorf("8 of 10 bytes of work done: got %v", err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestDepthIsBounded(t *testing.T) {
	nested := func(s string) string {
		for range 2 * maxDepth {
			s = gzipped(t, []byte(s))
		}
		return s
	}
	ds := blobs(t, "x", nested("one"), nested("two"), Known{})
	if len(ds) == 0 || len(ds[0].Where) > maxDepth+1 {
		t.Errorf("got %+v", ds)
	}
}

func TestNamesOfMembersArePrintable(t *testing.T) {
	evil := "a\x1b]0;title\x07\n\u202etxt"
	for name, pack := range map[string]func(string) string{
		"zip": func(s string) string { return zipped(t, s, "other"+s) },
		"tar": func(s string) string { return tarred(t, s, "other"+s) },
		"ar":  func(s string) string { return arred(s) },
	} {
		ds := blobs(t, "x"+evil, pack(evil), pack(evil+"2"), Known{}) // which checks each text
		if len(ds) == 0 {
			t.Errorf("%s: no difference", name)
		}
	}
}

func TestClaimedSizesAreVerified(t *testing.T) {
	const huge = "9999999999"
	header := func(name, size string) string {
		return fmt.Sprintf("%-16s%-12s%-6s%-6s%-8s%-10s`\n", name, "0", "0", "0", "644", size)
	}
	z := zipped(t, "a")
	end := strings.LastIndex(z, "PK\x05\x06")
	manyEntries := []byte(z)
	binary.LittleEndian.PutUint16(manyEntries[end+8:], 0xffff)
	binary.LittleEndian.PutUint16(manyEntries[end+10:], 0xffff)
	hugeEntry := []byte(z)
	binary.LittleEndian.PutUint32(hugeEntry[strings.Index(z, "PK\x01\x02")+20:], 0xfffffff0)
	binary.LittleEndian.PutUint32(hugeEntry[strings.Index(z, "PK\x01\x02")+24:], 0xfffffff0)
	for name, s := range map[string]string{
		"ar":               arMagic + header("a/", huge),
		"ar, long names":   arMagic + header("//", huge),
		"ar, BSD":          arMagic + header("#1/"+huge, "20"),
		"ar, no name":      arMagic + header("/12345", "0"),
		"ar, negative":     arMagic + header("a/", "-60"),
		"tar":              tarred(t, "a")[:600],
		"zip, entries":     string(manyEntries),
		"zip, size":        string(hugeEntry),
		"gzip, cut":        gzipped(t, make([]byte, 1000))[:20],
		"zstd, window":     "\x28\xb5\x2f\xfd\x00\xff\x00\x00\x00",
		"bzip2, no stream": "BZh9",
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			ds := blobs(t, "x", s+"1", s+"2", Known{})
			runtime.ReadMemStats(&after)
			if len(ds) == 0 {
				t.Error("no difference")
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
				t.Errorf("allocated %d MiB, want at most 64", n>>20)
			}
		})
	}
}

// A zip directory may be as large as the file and takes a multiple of its size in memory.
func TestLargeZipDirectoriesAreComparedAsBytes(t *testing.T) {
	names := make([]string, 40_000)
	long := strings.Repeat("n", 200)
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for i := range names {
		if _, err := w.CreateHeader(&zip.FileHeader{Name: fmt.Sprint("d/", i, long)}); err != nil {
			t.Fatal(err)
		}
	}
	must.Succeed(t, w.Close())
	a := out.String()
	if _, err := readZip(section([]byte(a))); !errors.Is(err, errManyMembers) {
		t.Errorf("directory of 10 MB: got %v", err)
	}
	if ds := blobs(t, "x", a, strings.Replace(a, "d/77", "d/78", 1), Known{}); len(ds) != 1 || !strings.HasPrefix(ds[0].What, "content") {
		t.Errorf("got %d differences: %+v", len(ds), ds[0])
	}
}

func TestBlobsFailsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, kind := range []string{"", "\x00"} {
		if _, err := Blobs(ctx, "x", section([]byte(kind+"a")), section([]byte(kind+"b")), Known{}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
}

func TestFailedFormatsAddNothing(t *testing.T) {
	for name, fails := range map[string]func() error{
		"error": func() error { return errors.New("damaged") },
		"panic": func() error { panic("bug") },
	} {
		c := newComparison(t.Context(), Known{})
		f := format{name: "x", compare: func(c *comparison, _, _ *io.SectionReader) error {
			c.differ("partial", "1", "2", -1, Unknown)
			return fails()
		}}
		done, err := c.within("x").try(&f, section(nil), section(nil))
		if done || err != nil || !c.found.none() {
			t.Errorf("%s: done %v, %v, %v", name, done, err, c.found.all())
		}
	}
}

func FuzzBlobs(f *testing.F) {
	for _, pair := range [][2]string{
		{"", "x"},
		{"one\ntwo\n", "two\none\n"},
		{`{"a":[1,2]}`, `{"a":[2,1]}`},
		{arred("a", "b"), arred("b", "a")},
		{tarred(f, "a", "b"), tarred(f, "b", "a")},
		{zipped(f, "a", "b"), zipped(f, "b", "a")},
		{gzipped(f, []byte("Nov 22 2026 12:34:56")), gzipped(f, []byte("Nov 23 2026 12:34:56"))},
		{"pid 12 at 0x7f3a5c001230 /tmp/x.1", "pid 13 at 0x7f3a5c001240 /tmp/x.2"},
		{"\x28\xb5\x2f\xfd\x04\x00\x09\x00\x00abc", "\x28\xb5\x2f\xfd\x04\x00\x09\x00\x00abd"},
		{xzOne, xzTwo},
		{rpm(1, "one", xzOne), rpm(2, "two", xzTwo)},
	} {
		f.Add("x", []byte(pair[0]), []byte(pair[1]))
	}
	for _, i := range images {
		f.Add("x", []byte(imageOf(i.magic, i.at, i.fields, '1')), []byte(imageOf(i.magic, i.at, i.fields, '2')))
	}
	known := knownRuns()
	f.Fuzz(func(t *testing.T, name string, a, b []byte) {
		ds := blobs(t, name, string(a), string(b), known)
		if equal := bytes.Equal(a, b); equal != (len(ds) == 0) {
			t.Errorf("%d differences, equal: %v", len(ds), equal)
		}
	})
}

// Beyond the budget differences have no cause.
func TestWordsHaveABudget(t *testing.T) {
	for name, pair := range map[string][2]string{
		"text": {"at 12:00:00\n", "at 13:00:00\n"}, "json": {`{"time": "12:00:00"}`, `{"time": "13:00:00"}`},
	} {
		c := newComparison(t.Context(), Known{})
		c.budget.words = 0
		must.Succeed(t, c.descend("x", section([]byte(pair[0])), section([]byte(pair[1]))))
		if ds := c.found.all(); len(ds) == 0 || ds[0].Cause != Unknown {
			t.Errorf("%s: got %+v", name, ds)
		}
	}
}
