// SPDX-License-Identifier: Apache-2.0

// Package changes finds how two actions, results, directories or builds differ, by names and digests alone. It does not
// look into blobs; package compare does.
package changes

import (
	"errors"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// A Change is one difference between two actions, results or directories.
type Change struct {
	// What names the kind: "argument", "environment", "platform", "timeout", "input", "output", ...
	What string `json:"what"`
	// Name is the variable, the path or the number of the argument; "" if there is only one of the kind.
	Name string `json:"name,omitempty"`
	// Path is the path of EntryA and EntryB exactly as in the messages; it may be invalid. "" if there are no entries.
	Path string `json:"-"`
	// A and B are the values of each side as printable text of at most maxText bytes; "" means none.
	A string `json:"a"`
	B string `json:"b"`
	// EntryA and EntryB are the files or directories that A and B describe, or nil.
	EntryA *Entry `json:"-"`
	EntryB *Entry `json:"-"`
}

// Limits of a comparison of directories, which may be hostile and contain the same directory many times.
const (
	maxChanges = 1000
	maxPairs   = 1_000_000
	maxPath    = 64 << 10
)

// maxText limits the size of a Change's texts, in bytes.
const maxText = 200

// errEnough ends a comparison that has found maxChanges changes.
var errEnough = errors.New("too many changes")

func quote(s string) string { return printable.Quote(s, maxText) }
