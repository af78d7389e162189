// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"golang.org/x/crypto/ssh"
)

// payloadType is what an envelope says that a statement is.
const payloadType = "application/vnd.in-toto+json"

// MaxFile bounds a file with a statement or a key, in bytes.
const MaxFile = 16 << 20

// A Key signs statements, or checks that they are signed.
type Key struct {
	signer crypto.Signer // nil of a public key
	public crypto.PublicKey
	id     string
}

// ID returns the fingerprint of the key, as ssh-keygen -l prints it: "SHA256:...".
func (k *Key) ID() string { return k.id }

// ParsePrivateKey reads a private key without a passphrase, in the format of OpenSSH or in PEM: Ed25519, or ECDSA of
// the curve P-256. It fails with ErrKey.
func ParsePrivateKey(text []byte) (*Key, error) {
	raw, err := ssh.ParseRawPrivateKey(text)
	var locked *ssh.PassphraseMissingError
	switch {
	case errors.As(err, &locked):
		return nil, fmt.Errorf("%w: it has a passphrase; use a key without one, as made by: ssh-keygen -t ed25519 -N '' -f KEY", ErrKey)
	case err != nil:
		return nil, fmt.Errorf("%w: it is no private key in the format of OpenSSH or in PEM: %w", ErrKey, err)
	}
	if p, ok := raw.(*ed25519.PrivateKey); ok {
		raw = *p
	}
	signer, ok := raw.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%w: it cannot sign", ErrKey)
	}
	k, err := publicKey(signer.Public())
	if err != nil {
		return nil, err
	}
	k.signer = signer
	return k, nil
}

// ParsePublicKeys reads public keys: one a line as in OpenSSH's authorized_keys and files .pub, or one in PEM. Empty
// lines and those that begin with # are passed over. It fails with ErrKey; of no key at all, too.
func ParsePublicKeys(text []byte) ([]*Key, error) {
	if block, _ := pem.Decode(text); block != nil {
		public, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: a %q in PEM is no public key: %w", ErrKey, block.Type, err)
		}
		k, err := publicKey(public)
		return []*Key{k}, err
	}
	var keys []*Key
	for i, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		parsed, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, fmt.Errorf("%w: line %d is no public key of OpenSSH: %w", ErrKey, i+1, err)
		}
		c, ok := parsed.(ssh.CryptoPublicKey)
		if !ok {
			return nil, fmt.Errorf("%w: line %d: a key of the type %s is not supported; use Ed25519", ErrKey, i+1, parsed.Type())
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

func publicKey(public crypto.PublicKey) (*Key, error) {
	switch p := public.(type) {
	case ed25519.PublicKey:
	case *ecdsa.PublicKey:
		if p.Curve != elliptic.P256() {
			return nil, fmt.Errorf("%w: ECDSA of the curve %s is not supported; use Ed25519", ErrKey, p.Params().Name)
		}
	default:
		return nil, fmt.Errorf("%w: it is neither Ed25519 nor ECDSA of the curve P-256; make one by: ssh-keygen -t ed25519 -N '' -f KEY", ErrKey)
	}
	s, err := ssh.NewPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return &Key{public: public, id: ssh.FingerprintSHA256(s)}, nil
}

// A party is a Key as the library of envelopes works with it.
type party struct{ *Key }

func (p party) KeyID() (string, error)   { return p.id, nil }
func (p party) Public() crypto.PublicKey { return p.public }

func (p party) Sign(_ context.Context, data []byte) ([]byte, error) {
	if _, ok := p.public.(ed25519.PublicKey); ok {
		return p.signer.Sign(rand.Reader, data, crypto.Hash(0))
	}
	sum := sha256.Sum256(data)
	return p.signer.Sign(rand.Reader, sum[:], crypto.SHA256)
}

func (p party) Verify(_ context.Context, data, signature []byte) error {
	ok := false
	switch public := p.public.(type) {
	case ed25519.PublicKey:
		ok = ed25519.Verify(public, data, signature)
	case *ecdsa.PublicKey:
		sum := sha256.Sum256(data)
		ok = ecdsa.VerifyASN1(public, sum[:], signature)
	}
	if !ok {
		return errors.New("the signature is not of this key")
	}
	return nil
}

// Sign returns the statement in an envelope with the signature of a private key
// (https://github.com/secure-systems-lab/dsse).
func Sign(ctx context.Context, s *Statement, k *Key) ([]byte, error) {
	if k.signer == nil {
		return nil, fmt.Errorf("%w: it is public, and a private one signs", ErrKey)
	}
	payload, err := s.Encode()
	if err != nil {
		return nil, err
	}
	signer, err := dsse.NewEnvelopeSigner(party{k})
	if err != nil {
		return nil, err
	}
	envelope, err := signer.SignPayload(ctx, payloadType, payload)
	if err != nil {
		return nil, err
	}
	return json.Marshal(envelope)
}

// Open returns the statement in text, which may be in an envelope or not, and the IDs of those of keys that signed it.
// It fails with ErrStatement for what is no valid statement, and with ErrSignature if there are keys and none of them
// signed it. Where there are no keys nothing is checked of a signature, and no ID is returned.
func Open(ctx context.Context, text []byte, keys []*Key) (*Statement, []string, error) {
	var e dsse.Envelope
	if err := json.Unmarshal(text, &e); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrStatement, err)
	}
	if e.PayloadType == "" && e.Payload == "" {
		if len(keys) > 0 {
			return nil, nil, fmt.Errorf("%w: it has no signature at all", ErrSignature)
		}
		s, err := Decode(text)
		return s, nil, err
	}
	if e.PayloadType != payloadType {
		return nil, nil, fmt.Errorf("%w: the envelope holds a %q, not a %q", ErrStatement, e.PayloadType, payloadType)
	}
	if len(keys) == 0 {
		payload, err := e.DecodeB64Payload()
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrStatement, err)
		}
		s, err := Decode(payload)
		return s, nil, err
	}
	var verifiers []dsse.Verifier
	seen := map[string]bool{} // of a key that is there twice the library prints a warning
	for _, k := range keys {
		if !seen[k.id] {
			seen[k.id] = true
			verifiers = append(verifiers, party{k})
		}
	}
	verifier, err := dsse.NewEnvelopeVerifier(verifiers...)
	if err != nil {
		return nil, nil, err
	}
	// What is decoded below are the bytes that the signature is of.
	accepted, payload, err := verifier.VerifyAndDecode(ctx, &e)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrSignature, err)
	}
	var by []string
	for _, a := range accepted {
		by = append(by, a.KeyID)
	}
	s, err := Decode(payload)
	return s, by, err
}
