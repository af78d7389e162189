// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
)

// MaxBytes is the size of the largest manifest that Parse accepts.
const MaxBytes = 16 << 20

// ErrSyntax means that a text is not a manifest. Errors that wrap it name the line.
var ErrSyntax = errors.New("not a manifest of version 1")

// Parse is the inverse of Text. It accepts canonical text only and returns ErrSyntax for anything else. Its time and
// memory are linear in the size of the text.
func Parse(text []byte) (*Manifest, error) {
	if len(text) > MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes, more than %d", ErrSyntax, len(text), MaxBytes)
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
	// This finds missing, duplicate and misplaced lines, wrong hashes and other spellings.
	if canonical := p.m.Text(); canonical != string(text) {
		at := 0
		for at < min(len(canonical), len(text)) && canonical[at] == text[at] {
			at++
		}
		return nil, fmt.Errorf("%w: line %d is not in canonical form", ErrSyntax, 1+strings.Count(canonical[:at], "\n"))
	}
	return &p.m, nil
}

// A parser holds the lines read so far.
type parser struct {
	m        Manifest
	spec     strings.Builder
	volatile bool
}

var errUnknown = errors.New("unknown line")

func (p *parser) line(n int, line string) error {
	m := &p.m
	key, rest, _ := strings.Cut(line, " ")
	switch {
	case strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r > '~' }):
		return errors.New("not printable ASCII")
	case n == 1:
		if line != version {
			return fmt.Errorf("the first line is not %q", version)
		}
		return nil
	case line == separator:
		m.Spec = p.spec.String()
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
		key, rest, _ := strings.Cut(rest, " ")
		return set(m.Configuration.fields(), key, rest)
	case "toolchain":
		return p.toolchain(rest)
	case "remote-apis":
		return p.remoteAPIs(rest)
	case "spec-hash", "configuration-hash", "toolchain-hash", "remote-apis-hash":
		return nil // Parse compares them
	case "revision":
		return decode(rest, &m.Revision)
	case "sandbox":
		return decode(rest, &m.Sandbox)
	case "seed":
		m.Seed = new(uint64)
		return decode(rest, m.Seed)
	case "order":
		return decode(rest, &m.Order)
	case "output":
		return p.output(rest)
	}
	return set(append(m.request(), m.result()...), key, rest)
}

func (p *parser) toolchain(line string) error {
	t := &p.m.Toolchain
	switch key, rest, _ := strings.Cut(line, " "); key {
	case "programs":
		t.Complete = rest == complete
		return nil
	case "program":
		return appendProgram(&t.Programs, rest)
	default:
		return set(t.Host.fields(), key, rest)
	}
}

func (p *parser) remoteAPIs(line string) error {
	if p.m.RemoteAPIs == nil {
		p.m.RemoteAPIs = &RemoteAPIs{}
	}
	r := p.m.RemoteAPIs
	key, rest, _ := strings.Cut(line, " ")
	var f Fetched
	switch key {
	case "sum":
		r.Sum = rest
		return checkSum(rest)
	case "blob":
	case "result":
		if rest, f.Sum, _ = strings.Cut(rest, " "); checkSum(f.Sum) != nil {
			return checkSum(f.Sum)
		}
	default:
		return set(r.fields(), key, rest)
	}
	err := decode(rest, &f.Digest)
	r.Fetched = append(r.Fetched, f)
	return err
}

// checkSum returns an error for anything but a SHA-256 in hexadecimal.
func checkSum(text string) error {
	if !hexSum.MatchString(text) {
		return errors.New("no SHA-256")
	}
	return nil
}

func appendProgram(all *[]Program, line string) error {
	path, rest, err := unquote(line)
	if err != nil {
		return err
	}
	g := Program{path, strings.TrimPrefix(rest, " ")}
	if g.Sum != Unreadable {
		if err := checkSum(g.Sum); err != nil {
			return err
		}
	}
	*all = append(*all, g)
	return nil
}

func (p *parser) output(line string) error {
	path, rest, err := unquote(line)
	if err != nil {
		return err
	}
	kind, content, _ := strings.Cut(strings.TrimPrefix(rest, " "), " ")
	o := Output{Kind: Kind(kind), Path: path}
	switch o.Kind {
	case File, Executable, Tree, Root:
		err = decode(content, &o.Digest)
	case Symlink:
		err = decode(content, &o.Target)
	default:
		err = errUnknown
	}
	p.m.Outputs = append(p.m.Outputs, o)
	return err
}

func (p *parser) volatileLine(key, rest string) error {
	v := &p.m.Volatile
	switch key {
	case "unenforced":
		var limit string
		err := decode(rest, &limit)
		v.Unenforced = append(v.Unenforced, sandbox.Limit(limit))
		return err
	case "program":
		return appendProgram(&v.Programs, rest)
	case "usage":
		key, rest, _ := strings.Cut(rest, " ")
		return set(usageFields(&v.Usage), key, rest)
	}
	return set(slices.Concat(v.origin(), v.fingerprint(), v.persistent(), v.decision(), v.times(), v.counts()), key, rest)
}

// set reads the values of the field that key names.
func set(fields []field, key, text string) error {
	for _, f := range fields {
		if f.key == key {
			return decode(text, f.values...)
		}
	}
	return errUnknown
}

// decode reads values that encode wrote, with a space between them.
func decode(s string, values ...any) (err error) {
	for i, value := range values {
		if i > 0 {
			s = strings.TrimPrefix(s, " ")
		}
		switch v := value.(type) {
		case *string:
			if *v, s, err = unquote(s); err != nil {
				return err
			}
			continue
		case *word:
			if *v = word(s); !letters.MatchString(s) {
				err = errors.New("not a word")
			}
		case *cas.Digest:
			if s != "none" {
				*v, err = cas.ParseDigest(s)
			}
		case *bool:
			*v, err = strconv.ParseBool(s)
		case *int:
			*v, err = strconv.Atoi(s)
		case *int64:
			*v, err = strconv.ParseInt(s, 10, 64)
		case *uint64:
			*v, err = strconv.ParseUint(s, 10, 64)
		case *time.Time:
			*v, err = time.Parse(timeFormat, s)
		}
		return err
	}
	if s != "" {
		return errors.New("text after the closing quote")
	}
	return nil
}

var (
	hexSum  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	letters = regexp.MustCompile(`^[A-Za-z]+$`)
)
