// SPDX-License-Identifier: Apache-2.0

// Package changes says in what two actions, results, directories and builds are not equal, by the names and digests that they
// consist of. It does not look into blobs, which is package compare's business.
package changes

import (
	"errors"
	"strconv"
	"strings"
)

// A Change is one thing in which two actions, results or directories are not equal, without a look at what is in the
// blobs that they name.
type Change struct {
	// What it is: "argument", "environment", "platform", "timeout", "input", "output", ...
	What string `json:"what"`
	// Name says which of them: a variable, a path, the number of an argument; "" where there is but one.
	Name string `json:"name,omitempty"`
	// Path is that of EntryA and EntryB as it is in messages, which need not be one that can be made; "" where they have none.
	Path string `json:"-"`
	// A and B are what each side has, in printable text of at most MaxText bytes; "" is nothing.
	A string `json:"a"`
	B string `json:"b"`
	// EntryA and EntryB are the files or directories that A and B speak of, nil where they do not.
	EntryA *Entry `json:"-"`
	EntryB *Entry `json:"-"`
}

// Bounds of what is told of a pair of directories, and of how much is looked at: what they hold may be hostile, and name
// the same directory many times.
const (
	MaxChanges = 1000
	maxPairs   = 1_000_000
	maxPath    = 64 << 10
)

// MaxText bounds the texts of a Change, in bytes.
const MaxText = 200

// maxInMemory is the largest blob that a Reader reads by itself.
const maxInMemory = 64 << 20

// errEnough says that there are as many changes as are told.
var errEnough = errors.New("there are enough changes")

// cut stands where text was left out.
const cut = "..."

// quoted returns s as it is if nobody could take it for something else, and as a Go string in ASCII if not, cut to
// MaxText bytes.
func quoted(s string) string {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' }) {
		s = strconv.QuoteToASCII(s)
	}
	return shorten(s)
}

// shorten cuts a text that is ASCII to MaxText bytes.
func shorten(s string) string {
	if len(s) > MaxText {
		return s[:MaxText-len(cut)] + cut
	}
	return s
}

// commonPrefix returns how many bytes a and b begin with that are equal.
func commonPrefix(a, b string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
