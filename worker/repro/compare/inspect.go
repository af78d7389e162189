// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"io"
	"slices"
)

// FormatOf returns the name of the format of a file that begins with head, such as "elf", or "" if no format fits. The
// magic number of some file system images is beyond the first 32 KiB.
func FormatOf(head []byte) string {
	all := formats()
	i := slices.IndexFunc(all, func(f format) bool { return len(head) >= f.needs && f.is(head, "") })
	if i < 0 {
		return ""
	}
	return all[i].name
}

// A Member is a member of an archive: its name and properties, such as "mtime 0". They may be hostile.
type Member struct {
	Name   string   `json:"name"`
	Fields []string `json:"fields,omitempty"`
}

// errNoArchive means that a file is no archive whose members can be listed.
var errNoArchive = errors.New("not an archive")

// Members lists the members of an ar, cpio, tar or zip archive. It fails if s is none, is damaged or has too many
// members.
func Members(ctx context.Context, s *io.SectionReader) ([]Member, error) {
	head, err := window(s, 0, headSize)
	if err != nil {
		return nil, err
	}
	c := newComparison(ctx, Known{})
	var list func(*io.SectionReader) ([]member, error)
	switch FormatOf(head) {
	case "ar", "deb":
		list = c.arMembers
	case "cpio":
		list = c.cpioMembers
	case "tar":
		list = c.tarMembers
	case "jar", "epub", "wheel", "zip":
		list = func(s *io.SectionReader) ([]member, error) {
			z, err := readZip(s)
			if err != nil {
				return nil, err
			}
			return c.zipMembers(s, z)
		}
	default:
		return nil, errNoArchive
	}
	found, err := list(s)
	if err != nil {
		return nil, err
	}
	all := make([]Member, len(found))
	for i, m := range found {
		all[i].Name = m.name
		for _, f := range m.fields {
			if f.text != "" {
				all[i].Fields = append(all[i].Fields, f.what+" "+f.text)
			}
		}
	}
	return all, nil
}
