// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

func TestUsableLocalesPrefersLocaleSorting(t *testing.T) {
	for _, c := range []struct {
		name        string
		given, want []string
	}{
		{"some", []string{"C.utf8", "sv_SE.utf8", "de_DE", "de_DE.utf8@euro", "sv_SE.utf8", "tr_TR.iso88599"}, []string{"de_DE.utf8@euro", "sv_SE.utf8"}},
		{"none", []string{"C.utf8", "POSIX"}, []string{"C.utf8"}},
		{"nothing", nil, nil},
	} {
		expect.Slices(t, usableLocales(c.given), c.want, "%s", c.name)
	}
}

func TestArchivedLocales(t *testing.T) {
	archive := func(magic uint32, offset, size uint32, names string) []byte {
		b := make([]byte, 28)
		for i, v := range []uint32{magic, 0, 0, 0, 0, offset, size} {
			binary.NativeEndian.PutUint32(b[4*i:], v)
		}
		return append(b, names...)
	}
	const magic = 0xde020109
	good := archive(magic, 28, 16, "a.utf8\x00sv.utf8\x00\x00")
	expect.Slices(t, archivedLocales(bytes.NewReader(good)), []string{"a.utf8", "sv.utf8"})
	for what, b := range map[string][]byte{
		"short": good[:20], "of something else": archive(1, 28, 16, "a\x00"), "damaged": archive(magic, 1<<31, 1<<31, "a\x00"),
	} {
		expect.Slices(t, archivedLocales(bytes.NewReader(b)), nil, "%s", what)
	}
}
