// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

const (
	// leeway is how far the clocks of an issuer and of this host may be apart.
	leeway = 30 * time.Second
	// maxVerified is how many signed tokens are remembered, so that not every call verifies a signature.
	maxVerified = 1024
)

// An issuer is whose signed tokens are believed, and what they must say.
type issuer struct {
	keys   []key
	parser *jwt.Parser
	claims map[string]pattern
}

// newIssuer returns an issuer with keys. A name that is "" is not looked at.
func newIssuer(keys []key, name, audience string, claims map[string]pattern) *issuer {
	var algorithms []string
	for _, k := range keys {
		algorithms = append(algorithms, k.algorithm)
	}
	options := []jwt.ParserOption{jwt.WithValidMethods(algorithms), jwt.WithExpirationRequired(), jwt.WithLeeway(leeway), jwt.WithStrictDecoding()}
	if name != "" {
		options = append(options, jwt.WithIssuer(name))
	}
	if audience != "" {
		options = append(options, jwt.WithAudience(audience))
	}
	return &issuer{keys, jwt.NewParser(options...), claims}
}

// errKey says that a token was signed by nobody who is believed.
var errKey = errors.New("no key of its algorithm and name")

// verify returns until when a token is good.
func (i *issuer) verify(token string) (time.Time, error) {
	claims := jwt.MapClaims{}
	_, err := i.parser.ParseWithClaims(token, claims, func(t *jwt.Token) (any, error) {
		if _, ok := t.Header["crit"]; ok {
			return nil, errors.New("it has extensions (crit), of which none is known")
		}
		name, _ := t.Header["kid"].(string)
		var fitting jwt.VerificationKeySet
		for _, k := range i.keys {
			// The key says by which algorithm it is used, never the token.
			if k.algorithm == t.Method.Alg() && (k.name == "" || name == "" || k.name == name) {
				fitting.Keys = append(fitting.Keys, k.public)
			}
		}
		if len(fitting.Keys) == 0 {
			return nil, errKey
		}
		return fitting, nil
	})
	if err != nil {
		return time.Time{}, err
	}
	for name, want := range i.claims {
		if !says(claims[name], want) {
			return time.Time{}, fmt.Errorf("its claim %s is not that of a caller", name)
		}
	}
	expires, err := claims.GetExpirationTime()
	if err != nil {
		return time.Time{}, err
	}
	return expires.Add(leeway), nil
}

// says reports whether a claim is a text that is wanted, or a list that has one.
func says(claim any, want pattern) bool {
	switch v := claim.(type) {
	case string:
		return want.match(v)
	case []any:
		return slices.ContainsFunc(v, func(e any) bool { s, ok := e.(string); return ok && want.match(s) })
	}
	return false
}

// signed returns the caller of a token of which sum is the SHA-256.
func (r *Rules) signed(token string, sum [32]byte) (*caller, error) {
	now := time.Now()
	r.mu.Lock()
	seen, ok := r.verified[sum]
	r.mu.Unlock()
	if ok && now.Before(seen.until) {
		return seen.caller, nil
	}
	why := errors.New("it is that of no caller")
	if strings.Count(token, ".") == 2 {
		for _, c := range r.callers {
			if c.jwt == nil {
				continue
			}
			until, err := c.jwt.verify(token)
			if err != nil {
				why = nearer(why, err)
				continue
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.verified == nil || len(r.verified) >= maxVerified {
				r.verified = map[[32]byte]verified{}
			}
			r.verified[sum] = verified{c, until}
			return c, nil
		}
	}
	text := strconv.QuoteToASCII(why.Error()) // which may quote the token's head
	return nil, unauthenticated("the token in the header authorization is no good: %.200s", text[1:len(text)-1])
}

// nearer returns the error of the two that says more to whoever has the token: that of an issuer who has signed it.
func nearer(a, b error) error {
	if errors.Is(b, jwt.ErrTokenUnverifiable) || errors.Is(b, jwt.ErrTokenMalformed) || errors.Is(b, jwt.ErrTokenSignatureInvalid) {
		if errors.Is(a, jwt.ErrTokenInvalidClaims) || strings.HasPrefix(a.Error(), "its claim") {
			return a
		}
	}
	return b
}
