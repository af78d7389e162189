// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/crypto/ssh"
)

// minRSA and maxRSA limit the bits of an RSA key. Statements are kept for years, and NIST SP 800-57 does not approve
// shorter keys beyond 2030. ssh-keygen makes no longer ones.
const (
	minRSA = 3072
	maxRSA = 16384
)

// howTo ends errors about unusable keys.
const howTo = "make one with ssh-keygen -t ed25519 -f KEY"

// A Key signs statements or verifies signatures. Use ParsePrivateKey, ParsePublicKeys or AgentKey; every
// function refuses the zero Key.
type Key struct {
	public crypto.PublicKey
	wire   ssh.PublicKey // the same key in OpenSSH's form
	id     string
	// sign returns the signature of data that verify accepts; nil for a public key.
	sign func(ctx context.Context, data []byte) ([]byte, error)
}

// ID returns the fingerprint that ssh-keygen -l prints: "SHA256:...".
func (k *Key) ID() string { return k.id }

// ParsePrivateKey reads an Ed25519, ECDSA P-256 or RSA key in OpenSSH's format or PEM. The passphrase is nil if
// unknown. It fails with ErrKey, and also with ErrPassphrase if the passphrase is missing or wrong.
func ParsePrivateKey(text, passphrase []byte) (*Key, error) {
	raw, err := ssh.ParseRawPrivateKey(text)
	if _, ok := errors.AsType[*ssh.PassphraseMissingError](err); ok {
		if passphrase == nil {
			return nil, fmt.Errorf("%w: %w: none was given", ErrKey, ErrPassphrase)
		}
		raw, err = unlock(text, passphrase)
	}
	if err != nil {
		return nil, unreadable(text, err)
	}
	if p, ok := raw.(*ed25519.PrivateKey); ok {
		raw = *p
	}
	signer, ok := raw.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%w: not a signing key; %s", ErrKey, howTo)
	}
	k, err := publicKey(signer.Public())
	if err != nil {
		return nil, err
	}
	k.sign = func(_ context.Context, data []byte) ([]byte, error) {
		if _, ok := k.public.(ed25519.PublicKey); ok {
			return signer.Sign(rand.Reader, data, crypto.Hash(0))
		}
		sum := sha256.Sum256(data)
		return signer.Sign(rand.Reader, sum[:], crypto.SHA256)
	}
	return k, nil
}

// unlock decrypts a private key. It fails with ErrPassphrase if the passphrase is wrong.
func unlock(text, passphrase []byte) (any, error) {
	if len(passphrase) == 0 {
		return nil, fmt.Errorf("%w: the given one is empty", ErrPassphrase)
	}
	raw, err := ssh.ParseRawPrivateKeyWithPassphrase(text, passphrase)
	// PEM has no checksum: a wrong passphrase yields noise that is rarely valid ASN.1. For ECDSA package x509 returns
	// no typed error.
	var syntax asn1.SyntaxError
	var structure asn1.StructuralError
	if errors.Is(err, x509.IncorrectPasswordError) || errors.As(err, &syntax) || errors.As(err, &structure) ||
		err != nil && strings.HasPrefix(err.Error(), "x509: failed to parse EC private key: asn1: ") {
		return nil, fmt.Errorf("%w: the given one is wrong", ErrPassphrase)
	}
	return raw, err
}

// unreadable explains why text is not a usable private key.
func unreadable(text []byte, err error) error {
	block, _ := pem.Decode(text)
	switch {
	case errors.Is(err, ErrPassphrase):
		return fmt.Errorf("%w: %w", ErrKey, err)
	case block == nil:
		return fmt.Errorf("%w: neither an OpenSSH nor a PEM private key", ErrKey)
	case block.Type == "ENCRYPTED PRIVATE KEY":
		return fmt.Errorf("%w: encrypted PKCS #8 is not supported; convert it with ssh-keygen -p -f KEY", ErrKey)
	}
	return fmt.Errorf("%w: PEM block %q: %w", ErrKey, block.Type, err)
}

// ParsePublicKeys reads one or more public keys: PEM blocks, or lines as in OpenSSH's .pub and authorized_keys files.
// It fails with ErrKey. It rejects keys with options, because it would ignore that a key has expired or is an
// authority's.
func ParsePublicKeys(text []byte) ([]*Key, error) {
	if strings.HasPrefix(strings.TrimSpace(string(text)), "-----BEGIN ") {
		return publicBlocks(text)
	}
	var keys []*Key
	for i, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		parsed, _, options, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, fmt.Errorf("%w: line %d is not an OpenSSH public key: %w", ErrKey, i+1, err)
		}
		if len(options) > 0 {
			return nil, fmt.Errorf("%w: line %d: key options (%.40q) are not supported; remove them", ErrKey, i+1,
				options[0])
		}
		c, ok := parsed.(ssh.CryptoPublicKey)
		if !ok || strings.HasPrefix(parsed.Type(), "sk-") {
			return nil, fmt.Errorf("%w: line %d: key type %s is not supported; %s", ErrKey, i+1, parsed.Type(), howTo)
		}
		k, err := publicKey(c.CryptoPublicKey())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%w: no key", ErrKey)
	}
	return keys, nil
}

// publicBlocks reads public keys from PEM blocks.
func publicBlocks(text []byte) ([]*Key, error) {
	var keys []*Key
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			if strings.TrimSpace(string(text)) != "" || len(keys) == 0 {
				return nil, fmt.Errorf("%w: text after %d PEM keys", ErrKey, len(keys))
			}
			return keys, nil
		}
		var public any
		var err error
		if block.Type == "RSA PUBLIC KEY" {
			public, err = x509.ParsePKCS1PublicKey(block.Bytes)
		} else {
			public, err = x509.ParsePKIXPublicKey(block.Bytes)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: PEM block %q is not a public key: %w", ErrKey, block.Type, err)
		}
		k, err := publicKey(public)
		if err != nil {
			return nil, err
		}
		keys, text = append(keys, k), rest
	}
}

func publicKey(public crypto.PublicKey) (*Key, error) {
	switch p := public.(type) {
	case ed25519.PublicKey:
	case *ecdsa.PublicKey:
		if p.Curve != elliptic.P256() {
			return nil, fmt.Errorf("%w: ECDSA curve %s is not supported; %s", ErrKey, p.Params().Name, howTo)
		}
	case *rsa.PublicKey:
		if n := p.N.BitLen(); n < minRSA || n > maxRSA {
			return nil, fmt.Errorf("%w: RSA key of %d bits, want %d to %d; %s", ErrKey, n, minRSA, maxRSA, howTo)
		}
	default:
		return nil, fmt.Errorf("%w: neither Ed25519, ECDSA P-256 nor RSA; %s", ErrKey, howTo)
	}
	s, err := ssh.NewPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return &Key{public: public, wire: s, id: ssh.FingerprintSHA256(s)}, nil
}

// verify fails if signature is not this key's signature of data. It accepts both RSA schemes.
func (k *Key) verify(data, signature []byte) error {
	sum := sha256.Sum256(data)
	ok := false
	switch public := k.public.(type) {
	case ed25519.PublicKey:
		ok = ed25519.Verify(public, data, signature)
	case *ecdsa.PublicKey:
		ok = ecdsa.VerifyASN1(public, sum[:], signature)
	case *rsa.PublicKey:
		ok = rsa.VerifyPKCS1v15(public, crypto.SHA256, sum[:], signature) == nil ||
			rsa.VerifyPSS(public, crypto.SHA256, sum[:], signature, &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthAuto}) == nil
	}
	if !ok {
		return errors.New("the signature is not by this key")
	}
	return nil
}

// A party is a Key as a dsse.SignerVerifier.
type party struct{ *Key }

func (p party) KeyID() (string, error)   { return p.id, nil }
func (p party) Public() crypto.PublicKey { return p.public }

// Sign checks the signature before it returns it, because agents have bugs, too.
func (p party) Sign(ctx context.Context, data []byte) ([]byte, error) {
	signature, err := p.sign(ctx, data)
	if err == nil {
		err = p.verify(data, signature)
	}
	if err != nil {
		return nil, fmt.Errorf("sign by %s: %w", p.id, err)
	}
	return signature, nil
}

func (p party) Verify(_ context.Context, data, signature []byte) error {
	return p.verify(data, signature)
}
