// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"maps"
	"math/big"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/golang-jwt/jwt/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// keys has a key of each kind.
type keys struct {
	rsa, other *rsa.PrivateKey
	ec         *ecdsa.PrivateKey
	ed         ed25519.PrivateKey
}

func newKeys(t *testing.T) *keys {
	t.Helper()
	var k keys
	var errs [4]error
	k.rsa, errs[0] = rsa.GenerateKey(rand.Reader, 2048)
	k.other, errs[1] = rsa.GenerateKey(rand.Reader, 2048)
	k.ec, errs[2] = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	_, k.ed, errs[3] = ed25519.GenerateKey(rand.Reader)
	for _, err := range errs {
		must.Succeed(t, err)
	}
	return &k
}

// publicPEM returns a public key as PEM.
func publicPEM(t *testing.T, public crypto.PublicKey) []byte {
	t.Helper()
	der := must.Get(x509.MarshalPKIXPublicKey(public))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

// sign returns a token; nil headers are omitted.
func sign(t *testing.T, method jwt.SigningMethod, secret any, header map[string]any, claims jwt.MapClaims) string {
	t.Helper()
	token := jwt.NewWithClaims(method, claims)
	maps.Copy(token.Header, header)
	return must.Get(token.SignedString(secret))(t)
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// TestRule131_SignedTokens checks that a token is valid if a key of the caller's issuer signed it with the key's
// algorithm, for this server and this time.
func TestRule131_SignedTokens(t *testing.T) {
	k := newKeys(t)
	dir := t.TempDir()
	public := publicPEM(t, &k.rsa.PublicKey)
	write(t, filepath.Join(dir, "keys.pem"), public)
	rules, err := access.Parse(filepath.Join(dir, "auth.yaml"), []byte(`
version: 1
callers:
  - name: main
    jwt: {keys: keys.pem, issuer: "https://issuer.example.com", audience: cloister, claims: {sub: "repo:org/*", groups: builders}}
    rights: [read]
`))
	must.Succeed(t, err)
	s := serve(t, rules, nil)
	call := func(token string) error {
		return calls["BatchReadBlobs"](t.Context(), s.dial(nil, "Bearer "+token), "")
	}
	now := time.Now()
	good := func() jwt.MapClaims {
		return jwt.MapClaims{
			"iss": "https://issuer.example.com", "aud": []string{"other", "cloister"}, "sub": "repo:org/project",
			"groups": []string{"users", "builders"}, "exp": now.Add(time.Hour).Unix(), "nbf": now.Add(-time.Hour).Unix(),
		}
	}
	for range 2 {
		must.Succeed(t, call(sign(t, jwt.SigningMethodRS256, k.rsa, nil, good())))
	}
	// Refusals of malformed tokens are printable, whatever these contain.
	for _, head := range []string{"{\"alg\":\u00e9}", "{\"alg\":\x1b[31m", "{\"alg\":\"\u00e9\"}", "\xff"} {
		err := call(b64([]byte(head)) + "." + b64([]byte("{}")) + "." + b64([]byte("x")))
		if text := status.Convert(err).Message(); status.Code(err) != codes.Unauthenticated || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("a head %q: %q", head, err)
		}
	}
	// Small clock differences are tolerated.
	fraction := good()
	fraction["exp"], fraction["nbf"] = float64(now.Add(time.Hour).Unix())+0.5, 0
	expect.Error(t, call(sign(t, jwt.SigningMethodRS256, k.rsa, nil, fraction)), nil)
	late := good()
	late["exp"] = now.Add(-5 * time.Second).Unix()
	expect.Error(t, call(sign(t, jwt.SigningMethodRS256, k.rsa, map[string]any{"kid": "any"}, late)), nil)
	for name, change := range map[string]func(c jwt.MapClaims){
		"no end":                        func(c jwt.MapClaims) { delete(c, "exp") },
		"an end as text":                func(c jwt.MapClaims) { c["exp"] = "tomorrow" },
		"expired":                       func(c jwt.MapClaims) { c["exp"] = now.Add(-time.Hour).Unix() },
		"not yet":                       func(c jwt.MapClaims) { c["nbf"] = now.Add(time.Hour).Unix() },
		"an end that overflows":         func(c jwt.MapClaims) { c["exp"] = 1e19 },
		"an end in milliseconds":        func(c jwt.MapClaims) { c["exp"] = now.Add(time.Hour).UnixMilli() },
		"an end of 400 digits":          func(c jwt.MapClaims) { c["exp"] = json.Number(strings.Repeat("9", 400)) },
		"a negative end":                func(c jwt.MapClaims) { c["exp"] = -now.Add(time.Hour).Unix() },
		"a beginning that overflows":    func(c jwt.MapClaims) { c["nbf"] = 1e19 },
		"a beginning in the year 10000": func(c jwt.MapClaims) { c["nbf"] = 253402300800 },
		"a beginning of 400 digits":     func(c jwt.MapClaims) { c["nbf"] = json.Number(strings.Repeat("9", 400)) },
		"a negative beginning":          func(c jwt.MapClaims) { c["nbf"] = -1e19 },
		"a beginning as text":           func(c jwt.MapClaims) { c["nbf"] = "yesterday" },
		"a beginning of null":           func(c jwt.MapClaims) { c["nbf"] = nil },
		"an issue that overflows":       func(c jwt.MapClaims) { c["iat"] = 1e300 },
		"an end of null":                func(c jwt.MapClaims) { c["exp"] = nil },
		"a list of ends":                func(c jwt.MapClaims) { c["exp"] = []int64{now.Add(time.Hour).Unix()} },
		"another issuer":                func(c jwt.MapClaims) { c["iss"] = "https://issuer.example.com.evil" },
		"no issuer":                     func(c jwt.MapClaims) { delete(c, "iss") },
		"another audience":              func(c jwt.MapClaims) { c["aud"] = "cloister2" },
		"no audience":                   func(c jwt.MapClaims) { delete(c, "aud") },
		"another subject":               func(c jwt.MapClaims) { c["sub"] = "repo:organisation/project" },
		"no subject":                    func(c jwt.MapClaims) { delete(c, "sub") },
		"other groups":                  func(c jwt.MapClaims) { c["groups"] = []string{"users"} },
		"groups of numbers":             func(c jwt.MapClaims) { c["groups"] = []int{1} },
	} {
		c := good()
		change(c)
		err := call(sign(t, jwt.SigningMethodRS256, k.rsa, nil, c))
		expect.That(t, status.Code(err) == codes.Unauthenticated, "%s: %v", name, err)
	}
	valid := sign(t, jwt.SigningMethodRS256, k.rsa, nil, good())
	parts := strings.Split(valid, ".")
	last := parts[2][len(parts[2])-1:]
	for name, token := range map[string]string{
		"signed by nobody":           sign(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, nil, good()),
		"none in other letters":      b64([]byte(`{"alg":"None"}`)) + "." + parts[1] + ".",
		"HMAC with the public key":   sign(t, jwt.SigningMethodHS256, public, nil, good()),
		"another key":                sign(t, jwt.SigningMethodRS256, k.other, nil, good()),
		"another algorithm":          sign(t, jwt.SigningMethodRS512, k.rsa, nil, good()),
		"the padding of another":     sign(t, jwt.SigningMethodPS256, k.rsa, nil, good()),
		"a key of another kind":      sign(t, jwt.SigningMethodES256, k.ec, nil, good()),
		"extensions":                 sign(t, jwt.SigningMethodRS256, k.rsa, map[string]any{"crit": []string{"exp"}}, good()),
		"no signature":               parts[0] + "." + parts[1] + ".",
		"two parts":                  parts[0] + "." + parts[1],
		"four parts":                 valid + ".x",
		"another payload":            parts[0] + "." + b64([]byte(`{"exp":99999999999}`)) + "." + parts[2],
		"a signature cut":            strings.TrimSuffix(valid, last),
		"a header that is no object": b64([]byte(`[]`)) + "." + parts[1] + "." + parts[2],
	} {
		expect.Code(t, call(token), codes.Unauthenticated, "%s", name)
	}
}

// TestSignedTokenEnds checks that a verified token expires.
func TestSignedTokenEnds(t *testing.T) {
	k := newKeys(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "keys.pem"), publicPEM(t, k.ed.Public()))
	rules, err := access.Parse(filepath.Join(dir, "auth.yaml"), []byte("version: 1\ncallers: [{name: j, jwt: {keys: keys.pem}, rights: [read]}]"))
	must.Succeed(t, err)
	conn := serve(t, rules, nil).dial(nil, "Bearer "+sign(t, jwt.SigningMethodEdDSA, k.ed, nil,
		jwt.MapClaims{"exp": time.Now().Add(-28 * time.Second).Unix()}))
	// Valid for a second or two, given the leeway of 30 seconds.
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if err := calls["BatchReadBlobs"](t.Context(), conn, ""); status.Code(err) == codes.Unauthenticated {
			return
		} else if err != nil || time.Now().After(end) {
			t.Fatalf("after its end: %v", err)
		}
	}
}

// TestKeySet checks that each key of a JSON Web Key Set verifies with its algorithm and name.
func TestKeySet(t *testing.T) {
	k := newKeys(t)
	point := must.Get(k.ec.PublicKey.Bytes())(t)
	set := func(extra ...map[string]any) []byte {
		all := append([]map[string]any{
			{"kty": "RSA", "kid": "r", "alg": "PS384", "n": b64(k.rsa.N.Bytes()), "e": b64(big.NewInt(int64(k.rsa.E)).Bytes())},
			{"kty": "EC", "kid": "e", "crv": "P-256", "x": b64(point[1:33]), "y": b64(point[33:]), "use": "sig"},
			{"kty": "OKP", "kid": "d", "crv": "Ed25519", "x": b64(k.ed.Public().(ed25519.PublicKey)), "key_ops": []string{"verify"}},
			{"kty": "oct", "kid": "for encryption", "use": "enc", "k": "AAAA"},
		}, extra...)
		all = append(all, map[string]any{"kty": "RSA", "kid": "o", "n": b64(k.other.N.Bytes()), "e": "AQAB"})
		return must.Get(json.Marshal(map[string]any{"keys": all}))(t)
	}
	dir := t.TempDir()
	read := func(b []byte) (*access.Rules, error) {
		write(t, filepath.Join(dir, "keys.json"), b)
		return access.Parse(filepath.Join(dir, "auth.yaml"), []byte("version: 1\ncallers: [{name: j, jwt: {keys: keys.json}, rights: [read]}]"))
	}
	rules := must.Get(read(set()))(t)
	s := serve(t, rules, nil)
	claims := jwt.MapClaims{"exp": time.Now().Add(time.Hour).Unix()}
	named := func(kid string) map[string]any { return map[string]any{"kid": kid} }
	for _, c := range []struct {
		token string
		good  bool
	}{
		{sign(t, jwt.SigningMethodPS384, k.rsa, named("r"), claims), true},
		{sign(t, jwt.SigningMethodPS384, k.rsa, nil, claims), true},
		{sign(t, jwt.SigningMethodES256, k.ec, named("e"), claims), true},
		{sign(t, jwt.SigningMethodEdDSA, k.ed, named("d"), claims), true},
		{sign(t, jwt.SigningMethodRS256, k.other, named("o"), claims), true},
		{sign(t, jwt.SigningMethodRS256, k.rsa, named("r"), claims), false}, // which is the other's algorithm
		{sign(t, jwt.SigningMethodRS256, k.rsa, nil, claims), false},
		{sign(t, jwt.SigningMethodRS256, k.other, named("r"), claims), false},
		{sign(t, jwt.SigningMethodES256, k.ec, named("r"), claims), false},
		{sign(t, jwt.SigningMethodHS256, []byte{0, 0, 0}, named("for encryption"), claims), false},
	} {
		err := calls["BatchReadBlobs"](t.Context(), s.dial(nil, "Bearer "+c.token), "")
		if (err == nil) != c.good || !c.good && status.Code(err) != codes.Unauthenticated {
			head, _, _ := strings.Cut(c.token, ".")
			t.Errorf("%s: %v", head, err)
		}
	}
	small := must.Get(rsa.GenerateKey(rand.Reader, 1024))(t)
	secret := must.Get(x509.MarshalPKCS8PrivateKey(k.ed))(t)
	for name, bad := range map[string][]byte{
		"HMAC":              set(map[string]any{"kty": "oct", "k": "AAAA", "alg": "HS256"}),
		"a secret key":      set(map[string]any{"kty": "OKP", "crv": "Ed25519", "x": b64(make([]byte, 32)), "d": "AAAA"}),
		"no point":          set(map[string]any{"kty": "EC", "crv": "P-256", "x": b64(make([]byte, 32)), "y": b64(make([]byte, 32))}),
		"another algorithm": set(map[string]any{"kty": "OKP", "crv": "Ed25519", "x": b64(make([]byte, 32)), "alg": "HS256"}),
		"a short key":       publicPEM(t, &small.PublicKey),
		"a bad exponent":    set(map[string]any{"kty": "RSA", "n": b64(k.rsa.N.Bytes()), "e": "AQ"}),
		"no keys":           []byte(`{"keys": []}`),
		"nothing":           nil,
		"no PEM":            []byte("ssh-ed25519 AAAA"),
		"a secret PEM":      pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
		"broken JSON":       []byte(`{"keys": [`),
	} {
		expect.That(t, expect.Err(read(bad)) != nil, "%s is taken for a public key", name)
	}
}
