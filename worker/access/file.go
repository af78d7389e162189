// SPDX-License-Identifier: Apache-2.0

package access

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
	"github.com/cloister-build/cloister/worker/internal/filestate"
)

// ReadFile reads a callers file (docs/auth.md) and the keys that it names. Mistakes are errors with their position.
func ReadFile(file string) (*Rules, error) {
	text, at, err := readSource(file)
	if err != nil {
		return nil, err
	}
	rules, err := Parse(file, text)
	if err != nil {
		return nil, err
	}
	rules.addSource(file, at)
	return rules, nil
}

// maxFile is the size limit of a file of callers or keys.
const maxFile = 1 << 20

// readSource reads a file, which must be a regular one: a pipe is empty when it is read again.
func readSource(file string) ([]byte, source, error) {
	text, state, err := filestate.Read(file, maxFile)
	return text, source{state, sha256.Sum256(text)}, err
}

// addSource records a file from which r was read.
func (r *Rules) addSource(file string, s source) {
	r.read[file] = s
	if s.state.Mode()&0o002 != 0 {
		r.risks = append(r.risks, fmt.Sprintf("everybody on this host can write to %s: chmod o-w", file))
	}
	if dir := filestate.Of(filepath.Dir(file)).Mode(); dir&0o002 != 0 && dir&fs.ModeSticky == 0 {
		r.risks = append(r.risks, fmt.Sprintf("everybody on this host can replace %s: chmod o-w %s", file, filepath.Dir(file)))
	}
}

// Parse parses the text of a callers file. File names in it are relative to the directory of file.
func Parse(file string, text []byte) (*Rules, error) {
	// Messages quote the lines around a mistake, which may contain a token.
	shown := tokenIn.ReplaceAll(text, []byte("$1..."))
	r := &reader{
		Decoder: strict.NewDecoder(file, "a callers file", shown), dir: filepath.Dir(file),
		rules: &Rules{read: map[string]source{}},
	}
	root, err := r.Parse(text)
	if err != nil {
		return nil, err
	}
	var version, callers bool
	err = r.Mapping(root, strict.Keys{
		"version": func(n *strict.Node) error {
			version = true
			if v, err := r.Scalar(n); err != nil || v != "1" {
				return r.Errorf(n, "this version of Cloister reads version 1")
			}
			return nil
		},
		"callers": func(n *strict.Node) error { callers = true; return r.Sequence(n, r.readCaller) },
	})
	switch {
	case err != nil:
		return nil, err
	case !version:
		return nil, r.Errorf(root, "missing version: write version: 1")
	case !callers: // unlike an empty list, with which an operator locks everybody out
		return nil, r.Errorf(root, "missing callers: write callers: [], if nobody may do anything")
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
func (r *reader) readCaller(n *strict.Node) error {
	c := &caller{rights: map[permission][]pattern{}}
	kinds := 0
	err := r.Mapping(n, strict.Keys{
		"name": func(n *strict.Node) (err error) {
			if c.name, err = r.Scalar(n); err == nil && !wellNamed.MatchString(c.name) {
				err = r.Errorf(n, "invalid name %q: use at most 64 letters, digits, '@', '.', '_' and '-'", c.name)
			}
			return err
		},
		"anonymous": func(n *strict.Node) error {
			kinds++
			if v, err := r.Scalar(n); err != nil || v != "true" {
				return r.Errorf(n, "write anonymous: true, for clients without a credential, or omit it")
			}
			c.anonymous = true
			return nil
		},
		"token_sha256": func(n *strict.Node) error { kinds++; return r.readTokens(n, c) },
		"certificate":  func(n *strict.Node) error { kinds++; return r.readCertificate(n, c) },
		"jwt":          func(n *strict.Node) error { kinds++; return r.readIssuer(n, c) },
		"rights": func(n *strict.Node) error {
			return r.Sequence(n, func(n *strict.Node) error { return r.readRight(n, c) })
		},
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
func (r *reader) texts(n *strict.Node, read func(text string, n *strict.Node) error) error {
	one := func(n *strict.Node) error {
		text, err := r.Scalar(n)
		if err != nil {
			return err
		}
		return read(text, n)
	}
	if n.IsSequence() {
		return r.Sequence(n, one)
	}
	return one(n)
}

func (r *reader) readTokens(n *strict.Node, c *caller) error {
	err := r.texts(n, func(text string, n *strict.Node) error {
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
func (r *reader) readPattern(n *strict.Node) (pattern, error) {
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

// readInstances reads the pattern of a right. A pattern that matches no instance name is a mistake: its author expects
// it to permit something, and /* and NAME/ would match the request of a worker for everything below an instance.
func (r *reader) readInstances(n *strict.Node) (pattern, error) {
	p, err := r.readPattern(n)
	if err != nil || p == "*" {
		return p, err
	}
	switch err := cas.CheckInstanceName(p.example()); {
	case p == "/*":
		return "", r.Errorf(n, "no instance matches /*: write * for all instances")
	case err != nil:
		return "", r.Errorf(n, "no instance matches %+.64q: %v", string(p), err)
	}
	return p, nil
}

func (r *reader) readCertificate(n *strict.Node, c *caller) error {
	c.certificate = map[string]string{}
	read := func(kind string) func(*strict.Node) error {
		return func(n *strict.Node) error {
			p, err := r.readPattern(n)
			if err == nil && p == "" {
				return r.Errorf(n, "empty name")
			}
			if kind == "uri" && err == nil && p.strict() {
				if err := checkURI(p.example()); err != nil {
					return r.Errorf(n, "no certificate matches a URI that contains %v", err)
				}
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

func (r *reader) readIssuer(n *strict.Node, c *caller) error {
	var keys []key
	var name, audience string
	claims := map[string]pattern{}
	text := func(to *string) func(*strict.Node) error {
		return func(n *strict.Node) (err error) {
			if *to, err = r.Scalar(n); err == nil && *to == "" {
				return r.Errorf(n, "write a value or omit the key")
			}
			return err
		}
	}
	err := r.Mapping(n, strict.Keys{
		"keys": func(n *strict.Node) error {
			file, err := r.Scalar(n)
			if err != nil {
				return err
			}
			if !filepath.IsAbs(file) {
				file = filepath.Join(r.dir, file)
			}
			text, at, err := readSource(file)
			if err == nil {
				keys, err = parseKeys(file, text)
			}
			if err != nil {
				return r.Errorf(n, "%v", err)
			}
			r.rules.addSource(file, at)
			return nil
		},
		"issuer":   text(&name),
		"audience": text(&audience),
		"claims": func(n *strict.Node) error {
			return r.Entries(n, func(claim string, _, value *strict.Node) (err error) {
				claims[claim], err = r.readPattern(value)
				return err
			})
		},
	})
	if err == nil && keys == nil {
		return r.Errorf(n, "missing public keys of the issuer: write keys: FILE")
	}
	c.jwt = newIssuer(keys, name, audience, claims)
	if err == nil && name == "" && audience == "" {
		r.rules.risks = append(r.rules.risks, fmt.Sprintf(
			"%s: signed tokens for every service that trusts the same keys are valid here: state issuer and audience", r.At(n)))
	}
	for _, k := range keys {
		if !k.expires.IsZero() && time.Now().After(k.expires) {
			r.rules.risks = append(r.rules.risks, fmt.Sprintf(
				"%s: a key is in a certificate that expired at %s, but still verifies tokens: remove or renew it",
				r.At(n), k.expires.UTC().Format(time.RFC3339)))
		}
	}
	return err
}

// readRight reads a right in all instances, or {RIGHT: INSTANCES}.
func (r *reader) readRight(n *strict.Node, c *caller) error {
	grant := func(name string, n *strict.Node, in []pattern) error {
		right, ok := parseRight(name)
		if !ok {
			return r.Unknown(n, "right", name, slices.Sorted(slices.Values(rightNames)))
		}
		if right == rightOperate && !slices.Equal(in, []pattern{"*"}) {
			return r.Errorf(n, "the right operate applies to the whole server: write it without instances")
		}
		c.rights[right] = append(c.rights[right], in...)
		return nil
	}
	if n.IsMapping() {
		return r.Entries(n, func(name string, key, value *strict.Node) error {
			var in []pattern
			err := r.texts(value, func(_ string, n *strict.Node) error {
				p, err := r.readInstances(n)
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
