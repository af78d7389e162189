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

// MinRSA and MaxRSA are how many bits an RSA key has, at least and at most. Statements are kept: fewer bits are not
// good beyond 2030 (NIST SP 800-57), and ssh-keygen has made no fewer for years. It makes no more, either.
const (
	MinRSA = 3072
	MaxRSA = 16384
)

// howTo ends messages about keys that cannot be used.
const howTo = "make one by: ssh-keygen -t ed25519 -f KEY"

// A Key signs statements, or checks that they are signed.
type Key struct {
	public crypto.PublicKey
	wire   ssh.PublicKey // the same, as OpenSSH has it
	id     string
	// sign returns the signature of data as verify takes it; nil of a public key.
	sign func(ctx context.Context, data []byte) ([]byte, error)
}

// ID returns the fingerprint of the key, as ssh-keygen -l prints it: "SHA256:...".
func (k *Key) ID() string { return k.id }

// ParsePrivateKey reads a private key, in the format of OpenSSH or in PEM: Ed25519, ECDSA of the curve P-256, or RSA of
// MinRSA bits and more. The passphrase is nil if none is known. It fails with ErrKey; with ErrPassphrase, too, if the key
// has a passphrase and it is not the one that was given.
func ParsePrivateKey(text, passphrase []byte) (*Key, error) {
	raw, err := ssh.ParseRawPrivateKey(text)
	var locked *ssh.PassphraseMissingError
	if errors.As(err, &locked) {
		if passphrase == nil {
			return nil, fmt.Errorf("%w: %w: it has one", ErrKey, ErrPassphrase)
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
		return nil, fmt.Errorf("%w: it cannot sign; %s", ErrKey, howTo)
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

// unlock decrypts a private key. The text of a passphrase that is another one is ErrPassphrase.
func unlock(text, passphrase []byte) (any, error) {
	if len(passphrase) == 0 {
		return nil, fmt.Errorf("%w: none was given", ErrPassphrase)
	}
	raw, err := ssh.ParseRawPrivateKeyWithPassphrase(text, passphrase)
	// The older of the two formats has no checksum: with another passphrase what comes out is rarely ASN.1. Of a key of ECDSA
	// package x509 says that by a text alone.
	var noise asn1.SyntaxError
	var other asn1.StructuralError
	if errors.Is(err, x509.IncorrectPasswordError) || errors.As(err, &noise) || errors.As(err, &other) ||
		err != nil && strings.HasPrefix(err.Error(), "x509: failed to parse EC private key: asn1: ") {
		return nil, fmt.Errorf("%w: another one was given", ErrPassphrase)
	}
	return raw, err
}

// unreadable says why a text is no private key that can be used.
func unreadable(text []byte, err error) error {
	block, _ := pem.Decode(text)
	switch {
	case errors.Is(err, ErrPassphrase):
		return fmt.Errorf("%w: %w", ErrKey, err)
	case block == nil:
		return fmt.Errorf("%w: it is no private key, neither in the format of OpenSSH nor in PEM", ErrKey)
	case block.Type == "ENCRYPTED PRIVATE KEY":
		return fmt.Errorf("%w: PKCS #8 with a passphrase is not supported; this writes it in OpenSSH's format: ssh-keygen -p -f KEY", ErrKey)
	}
	return fmt.Errorf("%w: a %q in PEM is no private key that can be used: %w", ErrKey, block.Type, err)
}

// ParsePublicKeys reads public keys: one a line as in OpenSSH's files .pub and authorized_keys, or in PEM. Between lines
// there may be empty ones and those that begin with #. It fails with ErrKey; of no key at all, too, and of one with options:
// that a key expires, or is that of an authority, would else be passed over.
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
			return nil, fmt.Errorf("%w: line %d is no public key of OpenSSH: %w", ErrKey, i+1, err)
		}
		if len(options) > 0 {
			return nil, fmt.Errorf("%w: line %d: options of a key (%.40q) mean nothing here; leave them out", ErrKey, i+1, options[0])
		}
		c, ok := parsed.(ssh.CryptoPublicKey)
		if !ok || strings.HasPrefix(parsed.Type(), "sk-") {
			return nil, fmt.Errorf("%w: line %d: a key of the type %s is not supported; %s", ErrKey, i+1, parsed.Type(), howTo)
		}
		k, err := publicKey(c.CryptoPublicKey())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%w: there is none", ErrKey)
	}
	return keys, nil
}

// publicBlocks reads public keys in PEM.
func publicBlocks(text []byte) ([]*Key, error) {
	var keys []*Key
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			if strings.TrimSpace(string(text)) != "" || len(keys) == 0 {
				return nil, fmt.Errorf("%w: after %d keys in PEM there is something else", ErrKey, len(keys))
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
			return nil, fmt.Errorf("%w: a %q in PEM is no public key: %w", ErrKey, block.Type, err)
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
			return nil, fmt.Errorf("%w: ECDSA of the curve %s is not supported; %s", ErrKey, p.Params().Name, howTo)
		}
	case *rsa.PublicKey:
		if n := p.N.BitLen(); n < MinRSA || n > MaxRSA {
			return nil, fmt.Errorf("%w: RSA of %d bits: from %d to %d are supported; %s", ErrKey, n, MinRSA, MaxRSA, howTo)
		}
	default:
		return nil, fmt.Errorf("%w: it is neither Ed25519, nor ECDSA of the curve P-256, nor RSA; %s", ErrKey, howTo)
	}
	s, err := ssh.NewPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return &Key{public: public, wire: s, id: ssh.FingerprintSHA256(s)}, nil
}

// verify fails if a signature of data is not of this key. One of RSA may be of either scheme.
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
		return errors.New("the signature is not of this key")
	}
	return nil
}

// A party is a Key as the library of envelopes works with it.
type party struct{ *Key }

func (p party) KeyID() (string, error)   { return p.id, nil }
func (p party) Public() crypto.PublicKey { return p.public }

// Sign returns a signature that verify has accepted: an agent may be of any make.
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
