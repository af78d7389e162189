// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
)

// TestLastRecordingIsCurrent records a store with this program and fails if it differs from the last recording in a
// format: of names, lines, JSON fields, or entries of segments. An earlier program may not understand the difference:
// raise the version of the layout unless it does, and record a store either way.
func TestLastRecordingIsCurrent(t *testing.T) {
	dir := t.TempDir()
	want := recordStore(t, built.Path(t), dir)
	recorded, _ := unpack(t, archiveOf(recordings[len(recordings)-1].name))
	now, then := formats(t, filepath.Join(dir, storeName), want), formats(t, recorded, want)
	const remedy = "record a store as the package comment shows"
	for _, format := range slices.Sorted(maps.Keys(now)) {
		if !then[format] {
			t.Errorf("this program writes %q, which the last recording lacks: %s", format, remedy)
		}
	}
	for _, format := range slices.Sorted(maps.Keys(then)) {
		if !now[format] {
			t.Errorf("this program no longer writes %q, which the last recording has: %s", format, remedy)
		}
	}
}

// formats returns the formats of everything in a store, without its values, as lines of text.
func formats(t *testing.T, store string, want *Contents) map[string]bool {
	t.Helper()
	host := must.Get(os.Hostname())(t) // unless root recorded the store
	all := map[string]bool{}
	must.Succeed(t, filepath.WalkDir(store, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(store, path)
		if err != nil {
			return err
		}
		switch {
		case name == "copies" || name == "tmp": // emptied when the store is opened
			return fs.SkipDir
		case e.IsDir() || e.Name() == "lock" || !e.Type().IsRegular():
			return nil // serve locks directories and listens on sockets
		}
		kind := withoutValues(filepath.ToSlash(name))
		all[kind] = true
		text, err := os.ReadFile(path)
		text = bytes.ReplaceAll(text, []byte(strconv.Quote(host)), []byte(`"worker"`))
		switch first, _, _ := strings.Cut(kind, "/"); {
		case err != nil || first == "files": // content as it is
		case first == "segments":
			if filepath.Ext(name) == ".log" {
				addEntries(t, all, text, must.Get(os.ReadFile(strings.TrimSuffix(path, ".log")+".data"))(t), want)
			}
		case filepath.Ext(name) == ".json":
			addLine(all, kind, string(text))
		default:
			for line := range strings.Lines(string(text)) {
				addLine(all, kind, line)
			}
		}
		return err
	}))
	return all
}

// values are the parts of names and lines that have no format, and what stands for them.
var values = []struct {
	pattern *regexp.Regexp
	kind    string
}{
	{regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`^[a-z0-9]{26,31}$`), "ID"},
	{regexp.MustCompile(`"[^"]*"`), "TEXT"},
	{regexp.MustCompile(`([a-z0-9]+:)?[0-9a-f]{32,}/[0-9]+`), "DIGEST"},
	{regexp.MustCompile(`(/[0-9a-f]{2}/)?[0-9a-f]{32,}(-[0-9]+)?`), "HASH"},
	{regexp.MustCompile(`^[0-9a-f]{8} `), "CHECKSUM "},
	{regexp.MustCompile(`\b[0-9]{8,}\b`), "NUMBER"},
	{regexp.MustCompile(`\b[0-9]+( |$)`), "NUMBER$1"},
	{regexp.MustCompile(`\b[A-Za-z0-9+/]{40,}`), "BASE64"},
}

func withoutValues(text string) string {
	for _, v := range values {
		text = v.pattern.ReplaceAllString(text, v.kind)
	}
	return text
}

// addLine adds the format of a line of a file, which may have a JSON value.
func addLine(all map[string]bool, file, line string) {
	line = strings.TrimSuffix(line, "\n")
	prefix, object, found := strings.Cut(line, "{")
	var value any
	if !found || json.Unmarshal([]byte("{"+object), &value) != nil {
		all[file+": "+withoutValues(line)] = true
		return
	}
	addJSON(all, file+": "+withoutValues(prefix), value)
}

// addJSON adds the fields of a JSON value and their types.
func addJSON(all map[string]bool, path string, value any) {
	switch value := value.(type) {
	case map[string]any:
		for name, field := range value {
			addJSON(all, path+"."+name, field)
		}
	case []any:
		for _, element := range value {
			addJSON(all, path+"[]", element)
		}
	default:
		all[fmt.Sprintf("%s %T", path, value)] = true
	}
}

// addEntries adds the records and contents of entries in a segment whose keys are 32 bytes long. It knows the format of
// records from the package comments of the store, not from its code.
func addEntries(t *testing.T, all map[string]bool, log, data []byte, want *Contents) {
	var digests []string
	for _, b := range want.Blobs {
		digests = append(digests, b.Digest)
	}
	for _, r := range want.Results {
		digests = append(digests, r.Action)
	}
	for _, d := range digests {
		hash, err := hex.DecodeString(digest(t, d).Hash())
		if err != nil || len(hash) != 32 {
			continue // shorter and longer ones are stored in the same way
		}
		for rest := log; ; {
			i := bytes.Index(rest, hash)
			if i < 28 || len(rest) < i+36 {
				break
			}
			record := slices.Clone(rest[i-28 : i+36])
			rest = rest[i+32:]
			offset, length := int(binary.LittleEndian.Uint32(record[12:]))*512, int(binary.LittleEndian.Uint32(record[24:]))
			var content []byte
			if offset+length <= len(data) {
				content = data[offset : offset+length]
			}
			for _, variable := range [][]byte{record[:4], record[8:16], record[60:]} { // checksum, stamp and offset, order
				clear(variable)
			}
			all[fmt.Sprintf("entry of %s: record %x, content %s", d, record, cas.SHA256.Sum(content))] = true
		}
	}
}
