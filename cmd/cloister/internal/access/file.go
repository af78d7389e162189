// SPDX-License-Identifier: Apache-2.0

package access

import (
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/internal/filestate"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
	"github.com/goccy/go-yaml/ast"
)

// ReadFile reads a callers file (docs/auth.md) and the keys that it names. Mistakes are errors with their position.
func ReadFile(file string) (*Rules, error) {
	at := filestate.Of(file)
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	rules, err := Parse(file, text)
	if err != nil {
		return nil, err
	}
	rules.read[file] = at
	return rules, nil
}

// Parse parses the text of a callers file. File names in it are relative to the directory of file.
func Parse(file string, text []byte) (*Rules, error) {
	// Messages quote the lines around a mistake, which may contain a token.
	shown := tokenIn.ReplaceAll(text, []byte("$1..."))
	r := &reader{
		Decoder: strict.NewDecoder(file, "a callers file", shown), dir: filepath.Dir(file),
		rules: &Rules{read: map[string]filestate.State{}},
	}
	root, err := r.Parse(text)
	if err != nil {
		return nil, err
	}
	var version bool
	err = r.Mapping(root, strict.Keys{
		"version": func(n ast.Node) error {
			version = true
			if v, err := r.Scalar(n); err != nil || v != "1" {
				return r.Errorf(n, "this version of Cloister reads version 1")
			}
			return nil
		},
		"callers": func(n ast.Node) error { return r.Sequence(n, r.readCaller) },
	})
	switch {
	case err != nil:
		return nil, err
	case !version:
		return nil, r.Errorf(root, "missing version: write version: 1")
	case len(r.rules.callers) == 0:
		return nil, r.Errorf(root, "no callers: nobody could do anything")
	}
	return r.rules, nil
}

// tokenIn matches the value after a key that begins with token.
var tokenIn = regexp.MustCompile(`(?i)(\btoken[a-z0-9_]*["']?[ \t]*:[ \t]*)[^\s\[{][^\n,}]*`)

// A reader turns the parts of a file into rules.
type reader struct {
	*strict.Decoder
	dir   string
	rules *Rules
}

// wellNamed matches valid caller names, which need no quoting in messages.
var wellNamed = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9@._-]{0,63}$`)

// readCaller reads the next caller.
func (r *reader) readCaller(n ast.Node) error {
	c := &caller{rights: map[Right][]pattern{}}
	kinds := 0
	err := r.Mapping(n, strict.Keys{
		"name": func(n ast.Node) (err error) {
			if c.name, err = r.Scalar(n); err == nil && !wellNamed.MatchString(c.name) {
				err = r.Errorf(n, "invalid name %q: use at most 64 letters, digits, '@', '.', '_' and '-'", c.name)
			}
			return err
		},
		"anonymous": func(n ast.Node) error {
			kinds++
			if v, err := r.Scalar(n); err != nil || v != "true" {
				return r.Errorf(n, "write anonymous: true, for clients without a credential, or omit it")
			}
			c.anonymous = true
			return nil
		},
		"token_sha256": func(n ast.Node) error { kinds++; return r.readTokens(n, c) },
		"certificate":  func(n ast.Node) error { kinds++; return r.readCertificate(n, c) },
		"jwt":          func(n ast.Node) error { kinds++; return r.readIssuer(n, c) },
		"rights":       func(n ast.Node) error { return r.Sequence(n, func(n ast.Node) error { return r.readRight(n, c) }) },
	})
	switch {
	case err != nil:
		return err
	case c.name == "":
		return r.Errorf(n, "caller without a name: write name: NAME")
	case kinds != 1:
		return r.Errorf(n, "caller %s: write exactly one of certificate, token_sha256, jwt and anonymous", c.name)
	case len(c.rights) == 0:
		return r.Errorf(n, "caller %s has no rights: write rights: [read], or remove the caller", c.name)
	}
	for _, other := range r.rules.callers {
		if other.name == c.name {
			return r.Errorf(n, "duplicate caller name %s", c.name)
		}
		if other.anonymous && c.anonymous {
			return r.Errorf(n, "caller %s is never reached: %s is anonymous, too", c.name, other.name)
		}
	}
	r.rules.callers = append(r.rules.callers, c)
	return nil
}

// texts reads a scalar or a list of scalars.
func (r *reader) texts(n ast.Node, read func(text string, n ast.Node) error) error {
	one := func(n ast.Node) error {
		text, err := r.Scalar(n)
		if err != nil {
			return err
		}
		return read(text, n)
	}
	if _, ok := n.(*ast.SequenceNode); ok {
		return r.Sequence(n, one)
	}
	return one(n)
}

func (r *reader) readTokens(n ast.Node, c *caller) error {
	err := r.texts(n, func(text string, n ast.Node) error {
		var sum [32]byte
		if b, err := hex.DecodeString(text); err != nil || len(b) != len(sum) {
			// It may be a token, so the message does not repeat it.
			return fmt.Errorf("%s: token_sha256 must be 64 hexadecimal digits: printf %%s TOKEN | sha256sum", r.At(n))
		} else {
			copy(sum[:], b)
		}
		for _, other := range append(slices.Clone(r.rules.callers), c) {
			if slices.Contains(other.tokens, sum) {
				return r.Errorf(n, "duplicate token: it must identify one caller")
			}
		}
		c.tokens = append(c.tokens, sum)
		return nil
	})
	if err == nil && len(c.tokens) == 0 {
		return r.Errorf(n, "missing token")
	}
	return err
}

// readPattern reads a name, PREFIX/* or *.
func (r *reader) readPattern(n ast.Node) (pattern, error) {
	text, err := r.Scalar(n)
	if err != nil {
		return "", err
	}
	// Only the last segment may be a star.
	if rest := strings.TrimSuffix(text, "*"); strings.Contains(rest, "*") || rest != text && rest != "" && !strings.HasSuffix(rest, "/") {
		return "", r.Errorf(n, "%q: write a complete name, PREFIX/* for all below, or * for all", text)
	}
	return pattern(text), nil
}

func (r *reader) readCertificate(n ast.Node, c *caller) error {
	c.certificate = map[string]string{}
	read := func(kind string) func(ast.Node) error {
		return func(n ast.Node) error {
			p, err := r.readPattern(n)
			if err == nil && p == "" {
				return r.Errorf(n, "empty name")
			}
			c.certificate[kind] = string(p)
			return err
		}
	}
	err := r.Mapping(n, strict.Keys{"subject": read("subject"), "uri": read("uri"), "dns": read("dns")})
	if err == nil && len(c.certificate) == 0 {
		return r.Errorf(n, "write subject, uri or dns of the certificate")
	}
	return err
}

func (r *reader) readIssuer(n ast.Node, c *caller) error {
	var keys []key
	var name, audience string
	claims := map[string]pattern{}
	text := func(to *string) func(ast.Node) error {
		return func(n ast.Node) (err error) {
			if *to, err = r.Scalar(n); err == nil && *to == "" {
				return r.Errorf(n, "write a value or omit the key")
			}
			return err
		}
	}
	err := r.Mapping(n, strict.Keys{
		"keys": func(n ast.Node) error {
			file, err := r.Scalar(n)
			if err != nil {
				return err
			}
			if !filepath.IsAbs(file) {
				file = filepath.Join(r.dir, file)
			}
			r.rules.read[file] = filestate.Of(file)
			if keys, err = readKeys(file); err != nil {
				return r.Errorf(n, "%v", err)
			}
			return nil
		},
		"issuer":   text(&name),
		"audience": text(&audience),
		"claims": func(n ast.Node) error {
			return r.Entries(n, func(claim string, _, value ast.Node) (err error) {
				claims[claim], err = r.readPattern(value)
				return err
			})
		},
	})
	if err == nil && keys == nil {
		return r.Errorf(n, "missing public keys of the issuer: write keys: FILE")
	}
	c.jwt = newIssuer(keys, name, audience, claims)
	return err
}

// readRight reads a right in all instances, or {RIGHT: INSTANCES}.
func (r *reader) readRight(n ast.Node, c *caller) error {
	grant := func(name string, n ast.Node, in []pattern) error {
		right, ok := rightNames[name]
		if !ok {
			return r.Unknown(n, "right", name, slices.Sorted(maps.Keys(rightNames)))
		}
		if right == Operate && !slices.Equal(in, []pattern{"*"}) {
			return r.Errorf(n, "the right operate applies to the whole server: write it without instances")
		}
		c.rights[right] = append(c.rights[right], in...)
		return nil
	}
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return r.Entries(n, func(name string, key, value ast.Node) error {
			var in []pattern
			err := r.texts(value, func(_ string, n ast.Node) error {
				p, err := r.readPattern(n)
				in = append(in, p)
				return err
			})
			if err == nil && len(in) == 0 {
				err = r.Errorf(value, "the right %s lists no instance: name some or omit the right", name)
			}
			if err != nil {
				return err
			}
			return grant(name, key, in)
		})
	}
	name, err := r.Scalar(n)
	if err != nil {
		return err
	}
	return grant(name, n, []pattern{"*"})
}

// String returns the number of callers, for the startup banner.
func (r *Rules) String() string {
	if len(r.callers) == 1 {
		return "1 caller"
	}
	return fmt.Sprintf("%d callers", len(r.callers))
}
