// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
)

// version is the first line. separator is the line between the stable and the volatile part.
const (
	version   = "cloister-manifest v1"
	separator = "volatile"
)

// timeFormat has a fixed width, so that times sort as text.
const timeFormat = "2006-01-02T15:04:05.000000000Z"

// Text returns the whole manifest: the stable part, the separator line, and the volatile part.
func (m *Manifest) Text() string {
	text, _ := m.Sealed()
	return text
}

// StableHash returns the SHA-256, in hexadecimal, of the text before the separator line.
func (m *Manifest) StableHash() string { return Hash(m.stable()) }

// Sealed returns Text and StableHash.
func (m *Manifest) Sealed() (text, stableHash string) {
	stable := m.stable()
	return stable + separator + "\n" + m.Volatile.text(), Hash(stable)
}

// Hash returns the hash of the toolchain section.
func (t *Toolchain) Hash() string { return Hash(t.text()) }

// Hash returns the hash of the configuration section.
func (c *Configuration) Hash() string { return Hash(c.text()) }

// Hash returns the SHA-256 of text in hexadecimal.
func Hash(text string) string {
	s := sha256.Sum256([]byte(text))
	return hex.EncodeToString(s[:])
}

// A field is a line with a key and values. Text writes it and Parse reads it.
type field struct {
	key string
	// values are pointers: *string is quoted text, *word an unquoted one.
	values []any
}

func line(key string, values ...any) field { return field{key, values} }

// A word is text that needs no quotes.
type word string

func (m *Manifest) request() []field {
	return []field{line("action", &m.Action), line("command", &m.Command), line("input-root", &m.InputRoot)}
}

// options are the fields that are present only if they are set.
func (m *Manifest) options() []field {
	var fields []field
	if m.Revision != "" {
		fields = append(fields, line("revision", &m.Revision))
	}
	if m.Sandbox != "" {
		fields = append(fields, line("sandbox", &m.Sandbox))
	}
	if m.Seed != nil {
		fields = append(fields, line("seed", m.Seed))
	}
	if m.Order != 0 {
		fields = append(fields, line("order", &m.Order))
	}
	return fields
}

func (m *Manifest) result() []field {
	return []field{
		line("status", (*word)(&m.Status)), line("exit", &m.ExitCode),
		line("stdout", &m.Stdout), line("stderr", &m.Stderr),
	}
}

func (c *Configuration) fields() []field {
	return []field{line("profile", &c.Profile), line("hermetic", &c.Hermetic), line("log-bytes", &c.LogBytes)}
}

func (h *Host) fields() []field {
	return []field{
		line("os", &h.OS, &h.Version), line("architecture", &h.Architecture), line("kernel", &h.Kernel, &h.Release),
	}
}

func (v *Volatile) origin() []field {
	return []field{
		line("worker", &v.Worker), line("backend", &v.Backend), line("tier", &v.Tier), line("audit", &v.Audit),
	}
}

func (v *Volatile) fingerprint() []field { return []field{line("fingerprint", &v.Fingerprint)} }

func (v *Volatile) persistent() []field { return []field{line("worker-request", &v.WorkerRequest)} }

func (v *Volatile) decision() []field {
	return []field{line("policy", &v.Policy), line("rule", &v.Rule)}
}

func (v *Volatile) times() []field {
	return []field{
		line("queued", &v.Queued), line("began", &v.Began), line("staging", &v.Staging),
		line("staged", &v.Staged), line("started", &v.Started), line("ended", &v.Ended),
	}
}

// usageFields returns the resources a run used. Their keys end in the unit.
func usageFields(u *sandbox.Usage) []field {
	return []field{
		line("user-ns", (*int64)(&u.User)), line("system-ns", (*int64)(&u.System)),
		line("peak-rss-bytes", &u.PeakRSS), line("peak-memory-bytes", &u.PeakMemory),
		line("peak-processes", &u.PeakProcesses),
		line("read-bytes", &u.ReadBytes), line("written-bytes", &u.WrittenBytes),
		line("voluntary-switches", &u.VoluntarySwitches), line("involuntary-switches", &u.InvoluntarySwitches),
		line("packets-refused", &u.PacketsRefused),
	}
}

func (v *Volatile) counts() []field {
	return []field{line("events", &v.Events), line("unrecorded", &v.Unrecorded)}
}

// encode returns the text of a value of a field.
func encode(value any) string {
	switch v := value.(type) {
	case *string:
		return quote(*v)
	case *word:
		return string(*v)
	case *cas.Digest:
		return digest(*v)
	case *bool:
		return strconv.FormatBool(*v)
	case *int:
		return strconv.Itoa(*v)
	case *int64:
		return strconv.FormatInt(*v, 10)
	case *uint64:
		return strconv.FormatUint(*v, 10)
	case *time.Time:
		return v.UTC().Format(timeFormat)
	}
	panic("manifest: field of an unknown type")
}

// lines builds text line by line.
type lines struct{ strings.Builder }

func (l *lines) add(words ...string) {
	for i, w := range words {
		if i > 0 {
			l.WriteByte(' ')
		}
		l.WriteString(w)
	}
	l.WriteByte('\n')
}

// fields adds a line per field, each after prefix.
func (l *lines) fields(prefix string, fields []field) {
	for _, f := range fields {
		l.WriteString(prefix)
		l.WriteString(f.key)
		for _, v := range f.values {
			l.WriteByte(' ')
			l.WriteString(encode(v))
		}
		l.WriteByte('\n')
	}
}

// section adds the hash of text and its lines, each after name.
func (l *lines) section(name, text string) {
	l.add(name+"-hash", Hash(text))
	for line := range strings.Lines(text) {
		l.WriteString(name)
		l.WriteByte(' ')
		l.WriteString(line)
	}
}

// sorted adds a line per item after key, sorted and without duplicates.
func (l *lines) sorted(key string, list []string) {
	slices.Sort(list)
	for _, line := range slices.Compact(list) {
		l.add(key, line)
	}
}

func (l *lines) programs(all []Program) {
	list := make([]string, len(all))
	for i, p := range all {
		list[i] = quote(p.Path) + " " + p.Sum
	}
	l.sorted("program", list)
}

func (m *Manifest) stable() string {
	var l lines
	l.Grow(2*len(m.Spec) + 256*(8+len(m.Outputs)+len(m.Toolchain.Programs))) // an estimate
	l.add(version)
	l.fields("", m.request())
	l.fields("", m.options())
	l.section("spec", m.Spec)
	l.section("configuration", m.Configuration.text())
	l.section("toolchain", m.Toolchain.text())
	if m.RemoteAPIs != nil {
		l.section("remote-apis", m.RemoteAPIs.text())
	}
	l.fields("", m.result())
	outputs := make([]string, len(m.Outputs))
	for i, o := range m.Outputs {
		content := quote(o.Target)
		if o.Kind != Symlink {
			content = digest(o.Digest)
		}
		outputs[i] = quote(o.Path) + " " + string(o.Kind) + " " + content
	}
	l.sorted("output", outputs)
	return l.String()
}

func (c *Configuration) text() string {
	var l lines
	l.fields("", c.fields())
	return l.String()
}

// The values of the line "programs".
const (
	complete   = "complete"
	incomplete = "incomplete"
)

func (t *Toolchain) text() string {
	var l lines
	l.fields("", t.Host.fields())
	programs := incomplete
	if t.Complete {
		programs = complete
	}
	l.add("programs", programs)
	l.programs(t.Programs)
	return l.String()
}

func (r *RemoteAPIs) fields() []field { return []field{line("count", &r.Count)} }

func (r *RemoteAPIs) text() string {
	var l lines
	l.fields("", r.fields())
	if r.Sum != "" {
		l.add("sum", r.Sum)
	}
	l.WriteString(fetchedText(r.Fetched))
	return l.String()
}

// fetchedText returns a line for each blob and result, sorted and without duplicates.
func fetchedText(all []Fetched) string {
	var l lines
	var blobs, results []string
	for _, f := range all {
		if f.Sum == "" {
			blobs = append(blobs, digest(f.Digest))
		} else {
			results = append(results, digest(f.Digest)+" "+f.Sum)
		}
	}
	l.sorted("blob", blobs)
	l.sorted("result", results)
	return l.String()
}

func (v *Volatile) text() string {
	var l lines
	l.Grow(1 << 10)
	l.fields("", v.origin())
	if v.Fingerprint != "" {
		l.fields("", v.fingerprint())
	}
	if v.WorkerRequest != 0 {
		l.fields("", v.persistent())
	}
	for _, limit := range v.Unenforced {
		l.add("unenforced", quote(string(limit)))
	}
	l.programs(v.Programs)
	l.fields("", v.decision())
	l.fields("", slices.DeleteFunc(v.times(), func(f field) bool { return f.values[0].(*time.Time).IsZero() }))
	l.fields("usage ", usageFields(&v.Usage))
	l.fields("", v.counts())
	return l.String()
}

// digest returns FUNCTION:HASH/SIZE, also for the default function.
func digest(d cas.Digest) string {
	if d.IsZero() {
		return "none"
	}
	return d.Function().String() + ":" + d.Hash() + "/" + strconv.FormatInt(d.Size(), 10)
}

// quote returns s in double quotes as printable ASCII with Go's escapes. It escapes everything beyond ASCII, because
// what Unicode considers printable changes with its version.
func quote(s string) string { return strconv.QuoteToASCII(s) }

// unquote reads a quoted text at the beginning of s and returns what follows it.
func unquote(s string) (text, rest string, err error) {
	q, err := strconv.QuotedPrefix(s)
	if err != nil {
		return "", "", err
	}
	text, err = strconv.Unquote(q)
	return text, s[len(q):], err
}
