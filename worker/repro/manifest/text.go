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

// version is the first line, separator the one after the stable part.
const (
	version   = "cloister-manifest v1"
	separator = "volatile"
)

// timeFormat has a fixed width, so that times sort as texts.
const timeFormat = "2006-01-02T15:04:05.000000000Z"

// Text returns the whole manifest: the stable part, the separator line, and the volatile part.
func (m *Manifest) Text() string {
	text, _ := m.Sealed()
	return text
}

// StableHash returns the SHA-256, in hexadecimal, of the text before the separator line.
func (m *Manifest) StableHash() string { return Hash(m.stable()) }

// Sealed returns what Text and StableHash do.
func (m *Manifest) Sealed() (text, stableHash string) {
	stable := m.stable()
	return stable + separator + "\n" + m.Volatile.text(), Hash(stable)
}

// Hash returns the fingerprint's own hash.
func (t *Toolchain) Hash() string { return Hash(t.text()) }

// Hash returns the configuration's own hash.
func (c *Configuration) Hash() string { return Hash(c.text()) }

// Hash returns the SHA-256 of a text, as StableHash and the hashes of sections are.
func Hash(text string) string {
	s := sha256.Sum256([]byte(text))
	return hex.EncodeToString(s[:])
}

// A lines is a text that grows by lines.
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

// section adds the hash of a text, and each line of it behind a name.
func (l *lines) section(name, text string) {
	l.add(name+"-hash", Hash(text))
	for line := range strings.Lines(text) {
		l.WriteString(name)
		l.WriteByte(' ')
		l.WriteString(line)
	}
}

// sorted adds lines in the order of their bytes, each once, behind a key.
func (l *lines) sorted(key string, list []string) {
	slices.Sort(list)
	for _, line := range slices.Compact(list) {
		l.add(key, line)
	}
}

// programs adds a line for each program.
func (l *lines) programs(all []Program) {
	list := make([]string, len(all))
	for i, p := range all {
		list[i] = quote(p.Path) + " " + p.Sum
	}
	l.sorted("program", list)
}

func (m *Manifest) stable() string {
	var l lines
	l.Grow(2*len(m.Spec) + 256*(8+len(m.Outputs)+len(m.Toolchain.Programs))) // about what it takes
	l.add(version)
	l.add("action", digest(m.Action))
	l.add("command", digest(m.Command))
	l.add("input-root", digest(m.InputRoot))
	if m.Revision != "" {
		l.add("revision", quote(m.Revision))
	}
	if m.Seed != nil {
		l.add("seed", strconv.FormatUint(*m.Seed, 10))
	}
	if m.Order != 0 {
		l.add("order", strconv.FormatUint(m.Order, 10))
	}
	l.section("spec", m.Spec)
	l.section("configuration", m.Configuration.text())
	l.section("toolchain", m.Toolchain.text())
	l.add("status", m.Status)
	l.add("exit", strconv.Itoa(m.ExitCode))
	l.add("stdout", digest(m.Stdout))
	l.add("stderr", digest(m.Stderr))
	outputs := make([]string, len(m.Outputs))
	for i, o := range m.Outputs {
		what := quote(o.Target)
		if o.Kind != Symlink {
			what = digest(o.Digest)
		}
		outputs[i] = quote(o.Path) + " " + string(o.Kind) + " " + what
	}
	l.sorted("output", outputs)
	return l.String()
}

func (c *Configuration) text() string {
	var l lines
	l.add("profile", quote(c.Profile))
	l.add("hermetic", strconv.FormatBool(c.Hermetic))
	l.add("log-bytes", strconv.FormatInt(c.LogBytes, 10))
	return l.String()
}

// Whether the list of programs is complete.
const (
	complete   = "complete"
	incomplete = "incomplete"
)

func (t *Toolchain) text() string {
	var l lines
	l.add("os", quote(t.OS), quote(t.Version))
	l.add("architecture", quote(t.Architecture))
	l.add("kernel", quote(t.Kernel), quote(t.Release))
	known := incomplete
	if t.Complete {
		known = complete
	}
	l.add("programs", known)
	l.programs(t.Programs)
	return l.String()
}

func (v *Volatile) text() string {
	var l lines
	l.Grow(1 << 10)
	l.add("worker", quote(v.Worker))
	l.add("backend", quote(v.Backend))
	l.add("tier", quote(v.Tier))
	l.add("audit", quote(v.Audit))
	for _, limit := range v.Unenforced {
		l.add("unenforced", quote(string(limit)))
	}
	l.programs(v.Programs)
	l.add("policy", quote(v.Policy))
	l.add("rule", quote(v.Rule))
	for _, m := range v.moments() {
		if !m.at.IsZero() {
			l.add(m.name, m.at.UTC().Format(timeFormat))
		}
	}
	for _, a := range amounts(&v.Usage) {
		l.add("usage", a.name, strconv.FormatInt(*a.of, 10))
	}
	l.add("events", strconv.Itoa(v.Events))
	l.add("unrecorded", strconv.Itoa(v.Unrecorded))
	return l.String()
}

// A moment is a time and its name.
type moment struct {
	name string
	at   *time.Time
}

func (v *Volatile) moments() []moment {
	return []moment{
		{"queued", &v.Queued}, {"began", &v.Began}, {"staging", &v.Staging}, {"staged", &v.Staged},
		{"started", &v.Started}, {"ended", &v.Ended},
	}
}

// An amount is something that was used, and its name, which ends in its unit.
type amount struct {
	name string
	of   *int64
}

func amounts(u *sandbox.Usage) []amount {
	return []amount{
		{"user-ns", (*int64)(&u.User)}, {"system-ns", (*int64)(&u.System)},
		{"peak-rss-bytes", &u.PeakRSS}, {"peak-memory-bytes", &u.PeakMemory}, {"peak-processes", &u.PeakProcesses},
		{"read-bytes", &u.ReadBytes}, {"written-bytes", &u.WrittenBytes},
		{"voluntary-switches", &u.VoluntarySwitches}, {"involuntary-switches", &u.InvoluntarySwitches},
		{"packets-refused", &u.PacketsRefused},
	}
}

// digest returns FUNCTION:HASH/SIZE, whatever the function.
func digest(d cas.Digest) string {
	if d.IsZero() {
		return "none"
	}
	return d.Function().String() + ":" + d.Hash() + "/" + strconv.FormatInt(d.Size(), 10)
}
