// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
)

// MaxBytes is the size of the largest manifest that Parse reads.
const MaxBytes = 16 << 20

// ErrSyntax says that a text is no manifest; what wraps it says where.
var ErrSyntax = errors.New("not a manifest of version 1")

// Parse reads what Text writes, and nothing else: a text that is not canonical is ErrSyntax. Whatever the text is, it
// takes time and memory in proportion to its size.
func Parse(text []byte) (*Manifest, error) {
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("%w: it has %d bytes, and %d are the most", ErrSyntax, len(text), MaxBytes)
	}
	p := &parser{}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSuffix(line, "\n")
		if err := p.line(n, line); err != nil {
			return nil, fmt.Errorf("%w: line %d, %+.80q: %w", ErrSyntax, n, line, err)
		}
	}
	// Whatever is missing, twice, in another order or written otherwise shows here.
	if again := p.m.Text(); again != string(text) {
		at := 0
		for at < min(len(again), len(text)) && again[at] == text[at] {
			at++
		}
		return nil, fmt.Errorf("%w: line %d is not what stands there in canonical form", ErrSyntax, 1+strings.Count(again[:at], "\n"))
	}
	return &p.m, nil
}

// A parser holds what was read so far.
type parser struct {
	m        Manifest
	spec     strings.Builder
	volatile bool
}

var errUnknown = errors.New("there is no such line")

func (p *parser) line(n int, line string) error {
	key, rest, _ := strings.Cut(line, " ")
	switch {
	case strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }):
		return errors.New("it is not printable ASCII")
	case n == 1:
		if line != version {
			return fmt.Errorf("the first line is %q", version)
		}
		return nil
	case line == separator:
		p.m.Spec = p.spec.String()
		p.volatile = true
		return nil
	case p.volatile:
		return p.volatileLine(key, rest)
	}
	switch key {
	case "spec":
		p.spec.WriteString(rest)
		p.spec.WriteByte('\n')
		return nil
	case "configuration":
		return p.configuration(rest)
	case "toolchain":
		return p.toolchain(rest)
	case "spec-hash", "configuration-hash", "toolchain-hash":
		return nil // they follow from the rest
	case "output":
		return p.output(rest)
	}
	return p.stableLine(key, rest)
}

func (p *parser) stableLine(key, rest string) (err error) {
	m := &p.m
	switch key {
	case "action":
		m.Action, err = parseDigest(rest)
	case "command":
		m.Command, err = parseDigest(rest)
	case "input-root":
		m.InputRoot, err = parseDigest(rest)
	case "revision":
		err = quotedAll(rest, &m.Revision)
	case "seed":
		m.Seed = new(uint64)
		*m.Seed, err = strconv.ParseUint(rest, 10, 64)
	case "order":
		m.Order, err = strconv.ParseUint(rest, 10, 64)
	case "status":
		if m.Status = rest; !letters.MatchString(rest) {
			err = errors.New("it has no word of letters")
		}
	case "exit":
		m.ExitCode, err = strconv.Atoi(rest)
	case "stdout":
		m.Stdout, err = parseDigest(rest)
	case "stderr":
		m.Stderr, err = parseDigest(rest)
	default:
		err = errUnknown
	}
	return err
}

func (p *parser) configuration(line string) (err error) {
	c := &p.m.Configuration
	switch key, rest, _ := strings.Cut(line, " "); key {
	case "profile":
		err = quotedAll(rest, &c.Profile)
	case "hermetic":
		c.Hermetic, err = strconv.ParseBool(rest)
	case "log-bytes":
		c.LogBytes, err = strconv.ParseInt(rest, 10, 64)
	default:
		err = errUnknown
	}
	return err
}

func (p *parser) toolchain(line string) (err error) {
	t := &p.m.Toolchain
	switch key, rest, _ := strings.Cut(line, " "); key {
	case "os":
		err = quotedAll(rest, &t.OS, &t.Version)
	case "architecture":
		err = quotedAll(rest, &t.Architecture)
	case "kernel":
		err = quotedAll(rest, &t.Kernel, &t.Release)
	case "programs":
		t.Complete = rest == complete
	case "program":
		var g Program
		g, err = program(rest)
		t.Programs = append(t.Programs, g)
	default:
		err = errUnknown
	}
	return err
}

func program(line string) (g Program, err error) {
	var rest string
	if g.Path, rest, err = unquote(line); err != nil {
		return g, err
	}
	g.Sum = strings.TrimPrefix(rest, " ")
	if g.Sum != Unreadable && !hexSum.MatchString(g.Sum) {
		return g, errors.New("it has no SHA-256")
	}
	return g, nil
}

func (p *parser) output(line string) (err error) {
	var o Output
	path, rest, err := unquote(line)
	if err != nil {
		return err
	}
	kind, what, _ := strings.Cut(strings.TrimPrefix(rest, " "), " ")
	o.Path, o.Kind = path, Kind(kind)
	switch o.Kind {
	case File, Executable, Tree, Root:
		o.Digest, err = parseDigest(what)
	case Symlink:
		err = quotedAll(what, &o.Target)
	default:
		err = errUnknown
	}
	p.m.Outputs = append(p.m.Outputs, o)
	return err
}

func (p *parser) volatileLine(key, rest string) (err error) {
	v := &p.m.Volatile
	switch key {
	case "worker":
		return quotedAll(rest, &v.Worker)
	case "backend":
		return quotedAll(rest, &v.Backend)
	case "tier":
		return quotedAll(rest, &v.Tier)
	case "audit":
		return quotedAll(rest, &v.Audit)
	case "unenforced":
		var limit string
		err = quotedAll(rest, &limit)
		v.Unenforced = append(v.Unenforced, sandbox.Limit(limit))
		return err
	case "program":
		var g Program
		g, err = program(rest)
		v.Programs = append(v.Programs, g)
		return err
	case "policy":
		return quotedAll(rest, &v.Policy)
	case "rule":
		return quotedAll(rest, &v.Rule)
	case "events":
		v.Events, err = strconv.Atoi(rest)
		return err
	case "unrecorded":
		v.Unrecorded, err = strconv.Atoi(rest)
		return err
	case "usage":
		name, number, _ := strings.Cut(rest, " ")
		for _, a := range amounts(&v.Usage) {
			if a.name == name {
				*a.of, err = strconv.ParseInt(number, 10, 64)
				return err
			}
		}
	}
	for _, m := range v.moments() {
		if m.name == key {
			*m.at, err = time.Parse(timeFormat, rest)
			return err
		}
	}
	return errUnknown
}

// quotedAll reads texts between quotes, with a space between them.
func quotedAll(s string, to ...*string) error {
	for i, t := range to {
		if i > 0 {
			s = strings.TrimPrefix(s, " ")
		}
		var err error
		if *t, s, err = unquote(s); err != nil {
			return err
		}
	}
	if s != "" {
		return errors.New("there is more behind the closing quote")
	}
	return nil
}

var (
	hexSum  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	letters = regexp.MustCompile(`^[A-Za-z]+$`)
)

func parseDigest(s string) (cas.Digest, error) {
	if s == "none" {
		return cas.Digest{}, nil
	}
	return cas.ParseDigest(s)
}
