// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// A Link is a page of Buildbarn's browser.
type Link struct {
	Instance string
	Kind     string // one of Kinds, or "file"
	Blob     cas.Digest
	Rest     string // a file name, or a directory below a Tree
}

// ParseLink parses the path of a page of Buildbarn's browser: /[INSTANCE/]blobs/FUNCTION/KIND/HASH-SIZE/[REST]. ok is
// false if it is not of this form; err says that it is, but malformed.
func ParseLink(path string) (l Link, ok bool, err error) {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	i := slices.Index(parts, "blobs") // no instance name contains it
	if i < 0 || len(parts) < i+4 {
		return l, false, nil
	}
	l = Link{Instance: strings.Join(parts[:i], "/"), Kind: parts[i+2], Rest: strings.Join(parts[i+4:], "/")}
	if !slices.Contains([]string{Action, Command, Directory, Tree, "file", Historical}, l.Kind) {
		return l, true, fmt.Errorf("%w: unknown kind of page %+.40q", cas.ErrInvalid, l.Kind)
	}
	if err := cas.CheckInstanceName(l.Instance); err != nil {
		return l, true, err
	}
	l.Blob, err = cas.ParseDigest(parts[i+1] + ":" + strings.Replace(parts[i+3], "-", "/", 1))
	return l, true, err
}
