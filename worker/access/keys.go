// SPDX-License-Identifier: Apache-2.0

package access

import (
	"bytes"
	"crypto"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"

	"github.com/cloister-build/cloister/worker/internal/pemblocks"
)

// A key verifies signatures of one algorithm.
type key struct {
	name      string // "kid", or ""
	algorithm string // as in "alg"
	public    crypto.PublicKey
	expires   time.Time // of its certificate, which is not enforced; zero without one
}

// minRSA is the minimum size of an RSA key in bits.
const minRSA = 2048

// parseKeys parses the public keys in the text of a file: PEM public keys or certificates, or a JSON Web Key Set. It
// refuses secret keys, which could sign tokens.
func parseKeys(file string, text []byte) (keys []key, err error) {
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		keys, err = parseSet(text)
	} else {
		keys, err = parsePEM(text)
	}
	if err == nil && len(keys) == 0 {
		err = errors.New("no public key: want PEM or a JSON Web Key Set")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return keys, nil
}

func parsePEM(text []byte) ([]key, error) {
	blocks, err := pemblocks.Decode(text)
	if err != nil {
		return nil, err
	}
	var keys []key
	for _, block := range blocks {
		var public any
		var expires time.Time
		switch block.Type {
		case "PUBLIC KEY":
			public, err = x509.ParsePKIXPublicKey(block.Bytes)
		case "RSA PUBLIC KEY":
			public, err = x509.ParsePKCS1PublicKey(block.Bytes)
		case "CERTIFICATE":
			var c *x509.Certificate
			if c, err = x509.ParseCertificate(block.Bytes); err == nil {
				public, expires = c.PublicKey, c.NotAfter
			}
		default:
			err = fmt.Errorf("%.40q is not a public key", block.Type)
		}
		if err != nil {
			return nil, err
		}
		k, err := newKey("", "", public)
		if err != nil {
			return nil, err
		}
		k.expires = expires
		keys = append(keys, k)
	}
	return keys, nil
}

// newKey returns a key with the stated algorithm, which must fit it, or with the default for its type.
func newKey(name, stated string, public any) (key, error) {
	var fit []string
	switch k := public.(type) {
	case *rsa.PublicKey:
		if k.N.BitLen() < minRSA {
			return key{}, fmt.Errorf("an RSA key of %d bits is too short: want at least %d", k.N.BitLen(), minRSA)
		}
		fit = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
	case *ecdsa.PublicKey:
		fit = map[elliptic.Curve][]string{
			elliptic.P256(): {"ES256"}, elliptic.P384(): {"ES384"}, elliptic.P521(): {"ES512"},
		}[k.Curve]
		if fit == nil {
			return key{}, errors.New("the curve of an ECDSA key must be P-256, P-384 or P-521")
		}
	case ed25519.PublicKey:
		fit = []string{"EdDSA"}
	default:
		return key{}, fmt.Errorf("unsupported key type %T: want RSA, ECDSA or Ed25519", public)
	}
	if stated == "" {
		stated = fit[0]
	}
	if !slices.Contains(fit, stated) {
		return key{}, fmt.Errorf("algorithm %.40q does not fit the key: want one of %v", stated, fit)
	}
	return key{name: name, algorithm: stated, public: public}, nil
}

// A webKey is a JSON Web Key (RFC 7517, 7518 and 8037).
type webKey struct {
	Kind      string   `json:"kty"`
	Name      string   `json:"kid"`
	Use       string   `json:"use"`
	Ops       []string `json:"key_ops"`
	Algorithm string   `json:"alg"`
	Curve     string   `json:"crv"`
	N, E      string
	X, Y      string
	Secret    string `json:"d"`
}

func parseSet(text []byte) ([]key, error) {
	var set struct{ Keys []webKey }
	if err := json.Unmarshal(text, &set); err != nil {
		return nil, fmt.Errorf("JSON Web Key Set: %w", err)
	}
	var keys []key
	for i, w := range set.Keys {
		if w.Use != "" && w.Use != "sig" || w.Ops != nil && !slices.Contains(w.Ops, "verify") {
			continue // not for verifying signatures
		}
		public, err := w.public()
		if err == nil {
			var k key
			if k, err = newKey(w.Name, w.Algorithm, public); err == nil {
				keys = append(keys, k)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("key %d (%+.60q): %w", i+1, w.Name, err)
		}
	}
	return keys, nil
}

// public returns the public key.
func (w *webKey) public() (any, error) {
	if w.Secret != "" {
		return nil, errors.New("secret key: want a public one")
	}
	var parts [4][]byte
	for i, text := range []string{w.N, w.E, w.X, w.Y} {
		var err error
		if parts[i], err = base64.RawURLEncoding.Strict().DecodeString(text); err != nil {
			return nil, err
		}
	}
	n, e, x, y := parts[0], parts[1], parts[2], parts[3]
	switch {
	case w.Kind == "RSA":
		exponent := new(big.Int).SetBytes(e)
		if exponent.BitLen() > 31 || exponent.Int64() < 3 || exponent.Bit(0) == 0 {
			return nil, errors.New("invalid RSA exponent")
		}
		return &rsa.PublicKey{N: new(big.Int).SetBytes(n), E: int(exponent.Int64())}, nil
	case w.Kind == "OKP" && w.Curve == "Ed25519" && len(x) == ed25519.PublicKeySize:
		return ed25519.PublicKey(x), nil
	case w.Kind == "EC":
		for _, c := range []struct {
			curve elliptic.Curve
			check ecdh.Curve
		}{{elliptic.P256(), ecdh.P256()}, {elliptic.P384(), ecdh.P384()}, {elliptic.P521(), ecdh.P521()}} {
			size := (c.curve.Params().BitSize + 7) / 8
			if w.Curve != c.curve.Params().Name || len(x) != size || len(y) != size {
				continue
			}
			if _, err := c.check.NewPublicKey(slices.Concat([]byte{4}, x, y)); err != nil {
				return nil, errors.New("the point is not on its curve")
			}
			return &ecdsa.PublicKey{Curve: c.curve, X: new(big.Int).SetBytes(x), Y: new(big.Int).SetBytes(y)}, nil
		}
	}
	return nil, fmt.Errorf("unsupported kind %.20q with curve %.20q: want RSA, EC with P-256, P-384 or P-521, OKP with Ed25519",
		w.Kind, w.Curve)
}
