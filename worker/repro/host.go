// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
)

// Where programs look for time zones and locales. The sandbox shows these directories of the host.
const (
	zoneinfo  = "/usr/share/zoneinfo"
	localeDir = "/usr/lib/locale"
)

// ThisHost describes this host. It ignores what it cannot read.
func ThisHost() Host {
	h := Host{CPUs: runtime.NumCPU()}
	for _, name := range zones {
		if _, err := os.Stat(path.Join(zoneinfo, name)); err == nil {
			h.Zones = append(h.Zones, name)
		}
	}
	entries, _ := os.ReadDir(localeDir)
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	if f, err := os.Open(path.Join(localeDir, "locale-archive")); err == nil {
		names = append(names, archivedLocales(f)...)
		f.Close()
	}
	h.Locales = usableLocales(names)
	return h
}

// usableLocales returns the UTF-8 locales that sort differently from bytes or, if there are none, the other UTF-8
// locales. Other encodings would not fit the text of inputs.
func usableLocales(names []string) []string {
	var sorting, plain []string
	for _, name := range names {
		language, encoding, _ := strings.Cut(name, ".")
		encoding, _, _ = strings.Cut(encoding, "@")
		switch {
		case !slices.Contains([]string{"utf8", "utf-8"}, strings.ToLower(encoding)):
		case language == "C" || language == "POSIX":
			plain = append(plain, name)
		default:
			sorting = append(sorting, name)
		}
	}
	slices.Sort(sorting)
	slices.Sort(plain)
	if all := slices.Compact(sorting); len(all) > 0 {
		return all
	}
	return slices.Compact(plain)
}

// maxNames limits the names of a locale archive, in bytes.
const maxNames = 1 << 20

// archivedLocales returns the names in a locale archive of the GNU C library (locarchive.h).
func archivedLocales(r io.ReaderAt) []string {
	var header [7 * 4]byte // magic, serial, namehash offset, used, size, string offset, used
	if n, _ := r.ReadAt(header[:], 0); n < len(header) {
		return nil
	}
	word := func(i int) uint32 { return binary.NativeEndian.Uint32(header[4*i:]) }
	if word(0) != 0xde020109 {
		return nil
	}
	table := make([]byte, min(word(6), maxNames))
	n, _ := r.ReadAt(table, int64(word(5)))
	var names []string
	for name := range bytes.SplitSeq(table[:n], []byte{0}) {
		if len(name) > 0 && len(name) < 100 {
			names = append(names, string(name))
		}
	}
	return names
}
