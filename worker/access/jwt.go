// SPDX-License-Identifier: Apache-2.0

package access

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

const (
	// leeway is the tolerated clock difference between an issuer and this host.
	leeway = 30 * time.Second
	// maxVerified limits the cache of verified tokens, which saves verifying a signature for each call.
	maxVerified = 1024
)

// An issuer has the keys and required claims of signed tokens.
type issuer struct {
	keys   []key
	parser *jwt.Parser
	claims map[string]pattern
}

// newIssuer returns an issuer with keys. An empty name or audience is not checked.
func newIssuer(keys []key, name, audience string, claims map[string]pattern) *issuer {
	var algorithms []string
	for _, k := range keys {
		algorithms = append(algorithms, k.algorithm)
	}
	options := []jwt.ParserOption{
		jwt.WithValidMethods(algorithms), jwt.WithExpirationRequired(), jwt.WithLeeway(leeway), jwt.WithStrictDecoding(),
		jwt.WithJSONNumber(), // for checkTimes
	}
	if name != "" {
		options = append(options, jwt.WithIssuer(name))
	}
	if audience != "" {
		options = append(options, jwt.WithAudience(audience))
	}
	return &issuer{keys, jwt.NewParser(options...), claims}
}

// errKey means that no trusted key matches a token.
var errKey = errors.New("no key matches its algorithm and name")

// verify verifies a token and returns when it expires.
func (i *issuer) verify(token string) (time.Time, error) {
	claims := jwt.MapClaims{}
	_, err := i.parser.ParseWithClaims(token, claims, func(t *jwt.Token) (any, error) {
		if _, ok := t.Header["crit"]; ok {
			return nil, errors.New("it has unknown extensions (crit)")
		}
		name, _ := t.Header["kid"].(string)
		var fitting jwt.VerificationKeySet
		for _, k := range i.keys {
			// The key decides its algorithm, never the token.
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
	if err := checkTimes(claims); err != nil {
		return time.Time{}, err
	}
	for name, want := range i.claims {
		if !claimMatches(claims[name], want) {
			return time.Time{}, fmt.Errorf("its claim %s does not match", name)
		}
	}
	expires, err := claims.GetExpirationTime()
	if err != nil {
		return time.Time{}, err
	}
	return expires.Add(leeway), nil
}

// lastSecond is the last second of the year 9999.
const lastSecond = 253402300799

// checkTimes returns an error if a time among the claims is not a number of seconds until the year 9999. The parser
// would convert other numbers to times in the past, and milliseconds to a time in the distant future.
func checkTimes(claims jwt.MapClaims) error {
	for _, name := range []string{"exp", "nbf", "iat"} {
		claim, ok := claims[name]
		if !ok {
			continue
		}
		n, _ := claim.(json.Number)
		if at, err := n.Float64(); err != nil || !(at >= 0 && at <= lastSecond) {
			return fmt.Errorf("its claim %s is not a time in seconds", name)
		}
	}
	return nil
}

// claimMatches reports whether a claim is a matching text, or a list that contains one.
func claimMatches(claim any, want pattern) bool {
	switch v := claim.(type) {
	case string:
		return want.match(v)
	case []any:
		return slices.ContainsFunc(v, func(e any) bool { s, ok := e.(string); return ok && want.match(s) })
	}
	return false
}

// signed returns the caller identified by a signed token, whose SHA-256 is sum.
func (r *Rules) signed(token string, sum [32]byte) (*caller, error) {
	now := time.Now()
	r.mu.Lock()
	seen, ok := r.verified[sum]
	r.mu.Unlock()
	if ok && now.Before(seen.until) {
		return seen.caller, nil
	}
	why := errors.New("it belongs to no caller")
	if strings.Count(token, ".") == 2 {
		for _, c := range r.callers {
			if c.jwt == nil {
				continue
			}
			until, err := c.jwt.verify(token)
			if err != nil {
				why = moreSpecific(why, err)
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
	text := strconv.QuoteToASCII(why.Error()) // may quote the token's header
	return nil, unauthenticated("invalid token in the header authorization: %.200s", text[1:len(text)-1])
}

// moreSpecific returns the more helpful of two errors: the one from the issuer that signed the token.
func moreSpecific(a, b error) error {
	if errors.Is(b, jwt.ErrTokenUnverifiable) || errors.Is(b, jwt.ErrTokenMalformed) || errors.Is(b, jwt.ErrTokenSignatureInvalid) {
		if errors.Is(a, jwt.ErrTokenInvalidClaims) || strings.HasPrefix(a.Error(), "its claim") {
			return a
		}
	}
	return b
}
