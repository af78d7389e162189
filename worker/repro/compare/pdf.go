// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
)

// maxObjects limits the objects of a PDF file.
const maxObjects = 1 << 16

var errNotPDF = errors.New("not a PDF file, or too many objects")

func isPDF(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte("%PDF-")) }

var (
	pdfObject = regexp.MustCompile(`(?:^|[\r\n ])(\d{1,10} \d{1,5}) obj\b`)
	// pdfEntry matches an entry of a dictionary with a text in parentheses or hexadecimal.
	pdfEntry = regexp.MustCompile(
		`/(\w+)\s*(\((?:[^()\\]|\\.)*\)|<[0-9A-Fa-f\s]*>|\[\s*<[0-9A-Fa-f\s]*>\s*<[0-9A-Fa-f\s]*>\s*\])`,
	)
	xmpEntry = regexp.MustCompile(`<(xmp:\w+|xmpMM:\w+|pdf:\w+)>([^<]*)<`)
)

// comparePDF compares objects: dictionaries by entries, and unpacked streams. The file's ID is a consequence, and the
// cross-reference table is ignored. It finds objects by how they begin and does not parse the file.
//
// Source: ISO 32000-1, chapter 7.
func comparePDF(c *comparison, a, b *io.SectionReader) error {
	return c.withBytes(a, b, func(a, b []byte) error {
		partsA, err := pdfParts(a)
		if err != nil {
			return err
		}
		partsB, err := pdfParts(b)
		if err != nil {
			return err
		}
		var ids [][2]string
		err = c.pieces("object", partsA, partsB, func(a, b piece) error {
			id, err := c.pdfPart(a, b)
			if id != [2]string{} {
				ids = append(ids, id)
			}
			return err
		})
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			c.identity("/ID", ids[0][0], ids[0][1], "trailer")
		}
		return nil
	})
}

// pdfParts splits a file into its head, its objects and its trailer.
func pdfParts(data []byte) ([]piece, error) {
	starts := pdfObject.FindAllSubmatchIndex(data, maxObjects+1)
	if len(starts) == 0 || len(starts) > maxObjects {
		return nil, errNotPDF
	}
	parts := []piece{{"head", section(data[:starts[0][2]])}}
	last := len(data)
	if n := bytes.LastIndex(data, []byte("endobj")); n > starts[len(starts)-1][2] {
		last = n
	}
	for i, m := range starts {
		end := last
		if i+1 < len(starts) {
			end = starts[i+1][2]
		}
		parts = append(parts, piece{"object " + string(data[m[2]:m[3]]), section(data[m[2]:end])})
	}
	return append(parts, piece{"trailer", section(data[last:])}), nil
}

// pdfPart compares two objects or trailers. It returns the IDs of both files if these are part of it and differ.
func (c *comparison) pdfPart(a, b piece) (id [2]string, err error) {
	err = c.withBytes(a.data, b.data, func(x, y []byte) error {
		dictA, streamA := pdfStream(x)
		dictB, streamB := pdfStream(y)
		reported := c.pdfEntries(dictA, dictB, pdfEntry, &id, a.name)
		if a.name == "trailer" || bytes.Contains(dictA, []byte("/XRef")) {
			return nil // offsets of objects
		}
		if bytes.Equal(streamA, streamB) {
			if !reported && !bytes.Equal(dictA, dictB) {
				c.contents(dictA, dictB, a.name)
			}
			return nil
		}
		return c.pdfStreams(dictA, streamA, dictB, streamB, a.name)
	})
	return id, err
}

// pdfStream splits an object into dictionary and stream, nil if there is none.
func pdfStream(object []byte) (dict, stream []byte) {
	dict, stream, ok := bytes.Cut(object, []byte("stream"))
	if !ok || bytes.HasSuffix(dict, []byte("end")) {
		return object, nil
	}
	stream = bytes.TrimPrefix(bytes.TrimPrefix(stream, []byte("\r")), []byte("\n"))
	if i := bytes.LastIndex(stream, []byte("endstream")); i >= 0 {
		stream = stream[:i]
	}
	return dict, stream
}

// pdfStreams compares two streams, unpacked if possible.
func (c *comparison) pdfStreams(dictA, a, dictB, b []byte, name string) error {
	deflated := func(dict []byte) bool {
		return bytes.Contains(dict, []byte("/FlateDecode")) && !bytes.Contains(dict, []byte("/DecodeParms"))
	}
	if deflated(dictA) && deflated(dictB) {
		x, releaseA, errA := c.inflate(a)
		if errA == nil {
			defer releaseA()
		}
		y, releaseB, errB := c.inflate(b)
		if errB == nil {
			defer releaseB()
		}
		if errors.Join(errA, errB) == nil {
			if bytes.Equal(x, y) {
				c.differ("compression of the stream", "", "", -1, Unknown, name)
				return nil
			}
			a, b = x, y
		}
	}
	reported := c.pdfEntries(a, b, pdfEntry, nil, name)
	reported = c.pdfEntries(a, b, xmpEntry, nil, name) || reported
	if reported {
		return nil
	}
	return c.within(name).descend("stream", section(a), section(b))
}

// pdfDates are the keys of times.
var pdfDates = []string{"CreationDate", "ModDate", "xmp:CreateDate", "xmp:ModifyDate", "xmp:MetadataDate"}

// pdfEntries compares the entries that a pattern matches, and reports whether it added a difference. It stores /ID in
// id instead.
func (c *comparison) pdfEntries(a, b []byte, entry *regexp.Regexp, id *[2]string, name string) bool {
	entriesA, entriesB := entry.FindAllSubmatch(a, maxStrings), entry.FindAllSubmatch(b, maxStrings)
	if len(entriesA) != len(entriesB) {
		return false
	}
	reported := 0
	for i, e := range entriesA {
		key, x, y := string(e[1]), string(e[2]), string(entriesB[i][2])
		if key != string(entriesB[i][1]) {
			return reported > 0
		}
		if x == y || reported == maxPerPiece {
			continue
		}
		if key == "ID" && id != nil {
			*id = [2]string{x, y}
			continue
		}
		reported++
		cause := c.textCause(x, y)
		switch {
		case slices.Contains(pdfDates, key) && cause != Zone:
			cause = Timestamp
		case strings.HasPrefix(key, "xmpMM:") && cause == Unknown:
			cause = Random // UUIDs of document and version
		}
		if strings.HasPrefix(key, "xmp") || strings.HasPrefix(key, "pdf:") {
			c.differ(key, x, y, -1, cause, name)
			continue
		}
		c.differ("/"+key, x, y, -1, cause, name)
	}
	return reported > 0
}
