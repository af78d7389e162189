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
	l.Blob, err = ParseDigest(parts[i+1], parts[i+3])
	return l, true, err
}

// ParseDigest parses HASH-SIZE, of the digest function with this name, or of the one that the length of the hash tells.
func ParseDigest(function, text string) (cas.Digest, error) {
	hash, size, _ := strings.Cut(text, "-")
	name := hash + "/" + size
	if function != "" {
		name = function + ":" + name
	}
	return cas.ParseDigest(name)
}

// PathOf is the inverse of ParseDigest: [FUNCTION/]HASH-SIZE.
func PathOf(d cas.Digest) string {
	name := fmt.Sprintf("%s-%d", d.Hash(), d.Size())
	if implied, err := ParseDigest("", name); err != nil || implied != d {
		name = d.Function().String() + "/" + name
	}
	return name
}
