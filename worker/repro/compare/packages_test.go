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
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// imageOf returns an image of a format with a byte in each field of its superblock.
func imageOf(magic string, at int, fields []imageField, fill byte) string {
	image := make([]byte, 36<<10)
	for _, f := range fields {
		for i := range f.size {
			image[f.at+i] = fill
		}
	}
	copy(image[at:], magic)
	return string(image)
}

var images = []struct {
	format, magic string
	at            int
	fields        []imageField
}{
	{"squashfs", "hsqs", 0, squashfsFields},
	{"fat", "\x55\xaa", 510, fatFields},
	{"swap", "SWAPSPACE2", 4086, swapFields},
	{"ext4", "\x53\xef", 1080, ext4Fields},
	{"iso9660", "CD001", 32769, isoFields},
}

func TestImagesNameFieldsOfSuperblocks(t *testing.T) {
	for _, row := range images {
		ds := blobs(t, "x.img", imageOf(row.magic, row.at, row.fields, '1'), imageOf(row.magic, row.at, row.fields, '2'), Known{})
		var got []string
		for _, d := range ds {
			got = append(got, d.What)
			if d.Format != row.format || d.Where[len(d.Where)-1] != "superblock" {
				t.Errorf("%s: got %+v", row.format, d)
			}
		}
		for _, f := range row.fields {
			if !slices.Contains(got, f.what) {
				t.Errorf("%s: got %q without %s", row.format, got, f.what)
			}
		}
	}
}

// rpm returns a package with one value of each known kind in its header, and a payload.
func rpm(buildTime uint32, host, payload string) string {
	header := func(entries ...[]byte) string {
		var index, data []byte
		for _, e := range entries {
			tag, kind, value := binary.BigEndian.Uint32(e), binary.BigEndian.Uint32(e[4:]), e[8:]
			index = binary.BigEndian.AppendUint32(index, tag)
			index = binary.BigEndian.AppendUint32(index, kind)
			index = binary.BigEndian.AppendUint32(index, uint32(len(data)))
			index = binary.BigEndian.AppendUint32(index, 1)
			data = append(data, value...)
		}
		head := binary.BigEndian.AppendUint32([]byte("\x8e\xad\xe8\x01\x00\x00\x00\x00"), uint32(len(entries)))
		return string(binary.BigEndian.AppendUint32(head, uint32(len(data)))) + string(index) + string(data)
	}
	entry := func(tag, kind uint32, value string) []byte {
		return append(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, tag), kind), value...)
	}
	lead := "\xed\xab\xee\xdb" + strings.Repeat("\x00", rpmLead-4)
	return lead + header(entry(1004, 7, "digest:x")) + header(entry(1006, 4, string(binary.BigEndian.AppendUint32(nil, buildTime))), entry(1007, 6, host+"\x00")) + payload
}

// What xz -0 makes of "made on one" and "made on two", and of "made on one" with a dictionary of 1 GiB.
const (
	xzOne   = "\xfd\x37\x7a\x58\x5a\x00\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x0c\x00\x00\x00\x8f\x98\x41\x9c\x01\x00\x0a\x6d\x61\x64\x65\x20\x6f\x6e\x20\x6f\x6e\x65\x00\x00\x08\xc6\x64\x62\x00\x01\x1f\x0b\x3d\x62\x0e\x7a\x90\x42\x99\x0d\x01\x00\x00\x00\x00\x01\x59\x5a"
	xzTwo   = "\xfd\x37\x7a\x58\x5a\x00\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x0c\x00\x00\x00\x8f\x98\x41\x9c\x01\x00\x0a\x6d\x61\x64\x65\x20\x6f\x6e\x20\x74\x77\x6f\x00\x00\x9f\xca\xc2\x09\x00\x01\x1f\x0b\x3d\x62\x0e\x7a\x90\x42\x99\x0d\x01\x00\x00\x00\x00\x01\x59\x5a"
	xzLarge = "\xfd\x37\x7a\x58\x5a\x00\x00\x04\xe6\xd6\xb4\x46\x02\x00\x21\x01\x24\x00\x00\x00\x5e\x1f\xc7\xf9\x01\x00\x0a\x6d\x61\x64\x65\x20\x6f\x6e\x20\x6f\x6e\x65\x00\x00\x87\xdb\x03\x1b\x26\x93\xb4\xc6\x00\x01\x23\x0b\xc2\x1b\xfd\x09\x1f\xb6\xf3\x7d\x01\x00\x00\x00\x00\x04\x59\x5a"
)

func TestPackagesAreCompared(t *testing.T) {
	ds := blobs(t, "a.rpm", rpm(1_700_000_000, "one", xzOne), rpm(1_700_000_100, "two", xzTwo), Known{&Facts{Hostname: "one"}, &Facts{Hostname: "two"}})
	var got []string
	for _, d := range ds {
		got = append(got, strings.Join(append(slices.Clone(d.Within), d.Format, d.What, string(d.Cause)), "/"))
	}
	want := []string{"rpm/build time/timestamp", "rpm/build host/hostname", "rpm/xz/text/line 1/hostname"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	deb := func(mtime string) string {
		return arMagic + strings.Join([]string{"debian-binary   ", mtime, "  0     0     100644  4         `\n2.0\n"}, "")
	}
	if ds := blobs(t, "x", deb("1700000000"), deb("1700000100"), Known{}); len(ds) != 1 || ds[0].Format != "deb" || ds[0].Cause != Timestamp {
		t.Errorf("deb: got %+v", ds)
	}
	book := func(chapter string) string {
		var out bytes.Buffer
		w := zip.NewWriter(&out)
		for _, member := range [][2]string{{"mimetype", "application/epub+zip"}, {"chapter", chapter}} {
			f, err := w.CreateHeader(&zip.FileHeader{Name: member[0], Method: zip.Store})
			must.Succeed(t, err)
			_, err = f.Write([]byte(member[1]))
			must.Succeed(t, err)
		}
		must.Succeed(t, w.Close())
		return out.String()
	}
	ds = blobs(t, "x", book("built 2023-11-14T22:13:20Z"), book("built 2023-11-14T22:15:00Z"), Known{})
	if len(ds) != 1 || !slices.Equal(ds[0].Within, []string{"epub"}) || ds[0].Where[1] != "chapter" || ds[0].Cause != Timestamp {
		t.Errorf("epub: got %+v", ds)
	}
	// A gem is a tar with packed tars, and a package of npm a packed tar.
	pack := func(mtime int64, name, content string) string {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		must.Succeed(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(mtime, 0)}))
		_, err := w.Write([]byte(content))
		must.Succeed(t, errors.Join(err, w.Close()))
		return out.String()
	}
	gem := func(mtime int64) string {
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		_, err := w.Write([]byte(pack(mtime, "lib/a.rb", "puts 1")))
		must.Succeed(t, errors.Join(err, w.Close()))
		return pack(0, "data.tar.gz", packed.String())
	}
	ds = blobs(t, "a.gem", gem(1_700_000_000), gem(1_700_000_100), Known{})
	if len(ds) == 0 || !slices.Equal(ds[0].Where, []string{"a.gem", "data.tar.gz", "contents", "lib/a.rb"}) || ds[0].What != "mtime" || ds[0].Cause != Timestamp {
		t.Errorf("gem: got %+v", ds)
	}
	for name, format := range map[string]string{"a.whl": "wheel", "a.zip": "zip"} {
		if ds := blobs(t, name, zipped(t, "a"), zipped(t, "b"), Known{}); len(ds) == 0 || ds[0].Format != format {
			t.Errorf("%s: got %+v", name, ds)
		}
	}
}

// A dictionary that takes more than the limit of unpacked bytes is not allocated.
func TestXzDictionaryIsLimited(t *testing.T) {
	if ds := blobs(t, "x", xzLarge, xzOne, Known{}); len(ds) != 1 || !strings.HasPrefix(ds[0].What, "content") {
		t.Errorf("got %+v", ds)
	}
}

// A header may repeat a tag for all entries of its index, each with all data as its value.
func TestRPMTagsAreReadOnce(t *testing.T) {
	entry := "\x00\x00\x03\xee\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x01" // 1006, a string at 0
	header := "\x8e\xad\xe8\x01\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x02" + strings.Repeat(entry, 3) + "a\x00"
	fields, _, err := rpmHeader(section([]byte(header)), 0)
	if err != nil || len(fields) != 1 || fields[0].text != "a" {
		t.Errorf("got %+v, %v", fields, err)
	}
}

// A watched context calls see whenever somebody asks whether it has ended.
type watched struct {
	context.Context
	see func()
}

func (w watched) Err() error {
	w.see()
	return nil
}

// Unpacked contents may contain compressed files in turn, and decoders keep large dictionaries.
func TestUnpackersEndBeforeTheirContentsAreCompared(t *testing.T) {
	open, last := 0, -1
	c := newComparison(watched{t.Context(), func() { last = open }}, Known{})
	unpacker := func(r io.Reader) (io.ReadCloser, error) {
		open++
		return closing{r, func() { open-- }}, nil
	}
	must.Succeed(t, comparePacked(c, section([]byte("a")), section([]byte("b")), unpacker))
	if last != 0 || open != 0 {
		t.Errorf("%d decoders are open when the contents are compared, %d at the end", last, open)
	}
}

type closing struct {
	io.Reader
	end func()
}

func (c closing) Close() error {
	c.end()
	return nil
}
