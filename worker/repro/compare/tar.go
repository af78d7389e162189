// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

func isTar(head []byte, _ string) bool {
	return len(head) >= 512 && bytes.Equal(head[257:262], []byte("ustar"))
}

func (c *comparison) tarMembers(s *io.SectionReader) ([]member, error) {
	var (
		all   []member
		limit memberLimit
	)
	for r := tar.NewReader(s); ; {
		if err := c.ctx.Err(); err != nil {
			return nil, err
		}
		h, err := r.Next()
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		// Package tar reads whole blocks and not ahead, so the content begins at the offset of s, except after a sparse
		// map.
		at, err := s.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeGNUSparse || h.PAXRecords["GNU.sparse.major"] != "" {
			return nil, errors.New("sparse members are not supported")
		}
		m := member{name: h.Name, fields: tarFields(h)}
		size := len(h.Name)
		for _, f := range m.fields {
			size += len(f.what) + len(f.text)
		}
		if err := limit.take(size); err != nil {
			return nil, err
		}
		if h.Size > 0 {
			m.content = inPlace(s, at, h.Size)
		}
		all = append(all, m)
	}
}

// tarFields returns all fields of a header except name and size.
func tarFields(h *tar.Header) []field {
	fs := []field{
		{"type", strconv.QuoteRuneToASCII(rune(h.Typeflag)), Unknown},
		{"mode", fmt.Sprintf("%04o", h.Mode), Mode},
		{"uid", strconv.Itoa(h.Uid), Owner},
		{"gid", strconv.Itoa(h.Gid), Owner},
		{"user", h.Uname, Owner},
		{"group", h.Gname, Owner},
		{"mtime", instant(h.ModTime), Timestamp},
		{"atime", instant(h.AccessTime), Timestamp},
		{"ctime", instant(h.ChangeTime), Timestamp},
		{"link", h.Linkname, Unknown},
		{"device", fmt.Sprint(h.Devmajor, ":", h.Devminor), Unknown},
		{"notation", h.Format.String(), Unknown},
	}
	known := []string{"path", "linkpath", "size", "uid", "gid", "uname", "gname", "mtime", "atime", "ctime"}
	for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
		if slices.Contains(known, key) {
			continue
		}
		cause := Unknown
		if strings.HasSuffix(key, "time") {
			cause = Timestamp
		}
		fs = append(fs, field{"pax " + key, h.PAXRecords[key], cause})
	}
	return fs
}

// instant returns t in seconds since 1970, with the date; "" for the zero time.
func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	decimal := strconv.FormatInt(t.Unix(), 10)
	if ns := t.Nanosecond(); ns != 0 {
		decimal += strings.TrimRight(fmt.Sprintf(".%09d", ns), "0")
	}
	return decimal + " (" + t.UTC().Format(time.RFC3339) + ")"
}
