// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// Magic numbers of ar(1). A thin archive names files instead of containing them.
const (
	arMagic   = "!<arch>\n"
	thinMagic = "!<thin>\n"
)

// arMembers returns the members of an ar archive with names in GNU's or BSD's form (ar.h; ar(5)).
func (*comparison) arMembers(s *io.SectionReader) ([]member, error) {
	const headerSize = 60
	magic, err := window(s, 0, len(arMagic))
	if err != nil {
		return nil, err
	}
	thin := string(magic) == thinMagic
	var (
		all   []member
		limit memberLimit
		names []byte // table of long names
	)
	for off := int64(len(arMagic)); off < s.Size(); {
		h, err := window(s, off, headerSize)
		if err != nil {
			return nil, err
		}
		if len(h) < headerSize || string(h[58:]) != "`\n" {
			return nil, fmt.Errorf("no member header at byte %d", off)
		}
		column := func(from, to int) string { return strings.TrimRight(string(h[from:to]), " ") }
		size, err := strconv.ParseInt(column(48, 58), 10, 64)
		if err != nil || size < 0 {
			return nil, fmt.Errorf("size of a member at byte %d: %q", off, column(48, 58))
		}
		off += headerSize
		name, special, skip, err := arName(s, column(0, 16), names, off)
		if err != nil {
			return nil, err
		}
		inline := !thin || special
		if inline && size > s.Size()-off || skip > size {
			return nil, errors.New("a member is longer than the archive")
		}
		if name == "(long names)" {
			if size > maxMemberBytes {
				return nil, errManyMembers
			}
			if names, err = window(s, off, int(size)); err != nil {
				return nil, err
			}
		}
		if err := limit.take(len(name) + headerSize); err != nil {
			return nil, err
		}
		m := member{name: name, derived: special, fields: []field{
			{"mtime", seconds(column(16, 28)), Timestamp},
			{"uid", column(28, 34), Owner},
			{"gid", column(34, 40), Owner},
			{"mode", column(40, 48), Mode},
		}}
		if inline {
			m.content = inPlace(s, off+skip, size-skip)
			off += size + size%2
		} else {
			m.fields = append(m.fields, field{"size", column(48, 58), Unknown})
		}
		all = append(all, m)
	}
	return all, nil
}

// arName returns the name of a member from the name field raw of its header. special means that the member is an index
// of the archive, and skip is how many bytes at off, the beginning of its content, are the name.
func arName(
	s *io.SectionReader, raw string, long []byte, off int64,
) (name string, special bool, skip int64, err error) {
	switch {
	case raw == "/" || raw == "/SYM64/" || strings.HasPrefix(raw, "__.SYMDEF"):
		return "(symbol table)", true, 0, nil
	case raw == "//":
		return "(long names)", true, 0, nil
	case strings.HasPrefix(raw, "#1/"):
		n, err := strconv.Atoi(raw[3:])
		if err != nil || n < 0 || n > 4096 {
			return "", false, 0, fmt.Errorf("length of a name: %q", raw)
		}
		p, err := window(s, off, n)
		name = strings.TrimRight(string(p), "\x00")
		if strings.HasPrefix(name, "__.SYMDEF") {
			return "(symbol table)", true, int64(n), err
		}
		return name, false, int64(n), err
	case strings.HasPrefix(raw, "/"):
		at, err := strconv.Atoi(raw[1:])
		if err != nil || at < 0 || at >= len(long) {
			return "", false, 0, fmt.Errorf("place of a name: %q", raw)
		}
		name, _, _ := strings.Cut(string(long[at:min(len(long), at+4096)]), "\n")
		return strings.TrimSuffix(name, "/"), false, 0, nil
	}
	return strings.TrimSuffix(raw, "/"), false, 0, nil
}

// seconds returns decimal seconds since 1970, with the date.
func seconds(decimal string) string {
	v, err := strconv.ParseInt(decimal, 10, 64)
	if err != nil || v < 0 || v > 253402300799 { // the year 9999
		return decimal
	}
	return decimal + " (" + time.Unix(v, 0).UTC().Format(time.RFC3339) + ")"
}
