// SPDX-License-Identifier: Apache-2.0

package revision

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// FuzzParse checks that the parsed entries of a tree object encode to entries that parse equally.
func FuzzParse(f *testing.F) {
	name := strings.Repeat("1", 20)
	f.Add([]byte("100644 a\x00" + name + "40000 b\x00" + name))
	f.Add([]byte("120000 l\x00" + name + "100755 p\x00" + name + "160000 m\x00" + name))
	f.Add([]byte("100644 ../a\x00" + name))
	f.Add([]byte("100644 a\x00" + name[:19]))
	f.Fuzz(func(t *testing.T, text []byte) {
		read := func(text []byte) ([]entry, error) {
			var d gitTree
			r := &reader{Config: Config{EmptySubmodules: true}, blobs: map[string]*gitBlob{}}
			err := r.parse(&d, text, 20)
			return d.entries, err
		}
		entries, err := read(text)
		if err != nil {
			return
		}
		var again []byte
		for _, e := range entries {
			object, err := hex.DecodeString(e.object)
			must.Be(t, err == nil && len(object) == 20 && badName(e.name) == "", "%+v", e)
			again = append(append(again, e.mode+" "+e.name+"\x00"...), object...)
		}
		if got, err := read(again); err != nil || !slices.Equal(got, entries) {
			t.Errorf("got %+v, %v, want %+v", got, err, entries)
		}
	})
}

func FuzzParseCommit(f *testing.F) {
	f.Add("tree " + strings.Repeat("1", 40) + "\nauthor A <a> 1 +0000\ncommitter C <c> 1700000001 +0100\n\ntext\n")
	f.Add("tree x\ncommitter > 1\n")
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := parseCommit(text); err == nil && (!isObjectName(c.tree) || c.time.IsZero()) {
			t.Errorf("%+v", c)
		}
	})
}
