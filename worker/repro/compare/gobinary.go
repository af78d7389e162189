// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"strings"
)

// maxBuildInfo limits the size of the build info. A program of a thousand modules has 100 KiB.
const maxBuildInfo = 1 << 20

// buildInfo returns the lines of a Go program's build info, "" if there are none.
//
// Since Go 1.18 the section consists of a header of 32 bytes and two strings with length prefixes: the version, and the
// lines between two sentinels of 16 bytes. Source: debug/buildinfo, which would read the whole file again.
func (f *elfFile) buildInfo(c *comparison) string {
	s := f.named(".go.buildinfo")
	if s == nil {
		return ""
	}
	data, release, err := f.load(c, s)
	if err != nil {
		return ""
	}
	defer release()
	const header, inline, frame = 32, 2, 16
	if len(data) < header || data[15]&inline == 0 {
		return ""
	}
	version, rest := lengthAndText(data[header:])
	lines, _ := lengthAndText(rest)
	if len(lines) > maxBuildInfo {
		return ""
	}
	if len(lines) >= 2*frame {
		lines = lines[frame : len(lines)-frame]
	}
	return "go\t" + string(version) + "\n" + string(lines)
}

func lengthAndText(p []byte) (text, rest []byte) {
	n, width := binary.Uvarint(p)
	if width <= 0 || n > uint64(len(p)-width) {
		return nil, nil
	}
	p = p[width:]
	return p[:n], p[n:]
}

// goInfo adds the differences between build settings such as "-trimpath" and "vcs.time".
func (e *elfComparison) goInfo(a, b string) {
	linesA, linesB := strings.Split(a, "\n"), strings.Split(b, "\n")
	onlyA, onlyB := subtract(linesA, linesB), subtract(linesB, linesA)
	if len(onlyA)+len(onlyB) == 0 {
		return
	}
	key := func(line string) string {
		line = strings.TrimPrefix(line, "build\t")
		if i := strings.IndexAny(line, "=\t"); i > 0 {
			return line[:i]
		}
		return line
	}
	byKey := map[string]string{}
	for _, line := range onlyB {
		byKey[key(line)] = line
	}
	e.goInfoReported = true
	for _, x := range onlyA[:min(len(onlyA), maxPerPiece)] {
		k := key(x)
		y := byKey[k]
		delete(byKey, k)
		if strings.HasPrefix(k, "CGO_") && y == "" {
			continue // -trimpath omits them
		}
		e.differ("build setting", x, y, -1, goCause(k, x, y, e.comparison), ".go.buildinfo", k)
	}
	n := 0
	for _, y := range onlyB {
		if k := key(y); byKey[k] != "" && n < maxPerPiece && !strings.HasPrefix(k, "CGO_") {
			n++
			e.differ("build setting", "", y, -1, goCause(k, "", y, e.comparison), ".go.buildinfo", k)
		}
	}
}

// goCause returns the cause of a different setting.
func goCause(key, x, y string, c *comparison) Cause {
	switch key {
	case "-trimpath":
		return Path
	case "vcs.time":
		return Timestamp
	}
	return c.textCause(x, y)
}
