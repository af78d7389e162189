// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// Unread are the input files that a run did not read. The nil Unread knows nothing.
type Unread struct {
	paths []string // sorted and printable, as the audit log of the run has them
	whole bool     // these are all
}

// AllRead returns the Unread of a run that read all its inputs.
func AllRead() *Unread { return &Unread{whole: true} }

// unreadLine begins the line of an input in the audit log of a run that was watched closely enough.
const unreadLine = "unread   "

// ReadUnread reads the audit log of a run, and returns nil if that does not say which inputs were read.
func ReadUnread(ctx context.Context, s cas.Store, log cas.Digest) (*Unread, error) {
	text, err := cas.ReadAll(ctx, s, log, maxMessage)
	if err != nil {
		return nil, err
	}
	u := &Unread{whole: true}
	for line := range bytes.Lines(text) {
		line := strings.TrimSuffix(string(line), "\n")
		if p, ok := strings.CutPrefix(line, unreadLine); ok {
			u.paths = append(u.paths, p)
		} else if len(u.paths) > 0 {
			u.whole = false // a line that counts the others
		}
	}
	if len(u.paths) == 0 {
		return nil, nil
	}
	slices.Sort(u.paths)
	return u, nil
}

// mark sets e.Read.
func (u *Unread) mark(e *Entry) {
	if u == nil || e.Kind == "symlink" {
		return
	}
	name := printable.Text(e.Path)
	if e.Kind != Directory {
		_, found := slices.BinarySearch(u.paths, name)
		switch {
		case found:
			e.Read = "unread"
		case u.whole:
			e.Read = "read"
		}
		return
	}
	first, _ := slices.BinarySearch(u.paths, name+"/")
	end, _ := slices.BinarySearch(u.paths, name+string('/'+1))
	n := end - first
	switch {
	case !u.whole:
		e.Read = fmt.Sprintf("at least %d unread", n)
	case n == 0:
		e.Read = "read"
	case int64(n) == e.Files && !e.Partial:
		e.Read = "unread"
	default:
		e.Read = fmt.Sprintf("%d unread", n)
	}
}
