// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// payloadType is the media type of a statement in an envelope.
const payloadType = "application/vnd.in-toto+json"

// MaxFile limits the size of a file with a statement or public keys, MaxKey that of a private key, in bytes.
const (
	MaxFile = 16 << 20
	MaxKey  = 1 << 20
)

// Sign returns the statement in a DSSE envelope (https://github.com/secure-systems-lab/dsse) signed by a private key.
func Sign(ctx context.Context, s *Statement, k *Key) ([]byte, error) {
	switch {
	case s == nil:
		return nil, fmt.Errorf("%w: the Statement is missing", ErrStatement)
	case k == nil || k.public == nil:
		return nil, errNoKey
	case k.sign == nil:
		return nil, fmt.Errorf("%w: signing needs a private key, not a public one", ErrKey)
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

// maxSignatures limits the signatures of an envelope, because each is tried with each key over the whole text.
const maxSignatures = 100

// Open returns the statement in text, with or without an envelope, and the IDs of the keys that signed it. It fails
// with ErrStatement if the statement is invalid, and with ErrSignature if there are keys and none of them signed it.
// Without keys it checks no signature and returns no ID.
func Open(ctx context.Context, text []byte, keys []*Key) (*Statement, []string, error) {
	var e dsse.Envelope
	if err := json.Unmarshal(text, &e); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrStatement, err)
	}
	if e.PayloadType == "" && e.Payload == "" {
		if len(keys) > 0 {
			return nil, nil, fmt.Errorf("%w: no signature", ErrSignature)
		}
		s, err := decode(text)
		return s, nil, err
	}
	if e.PayloadType != payloadType {
		return nil, nil, fmt.Errorf("%w: payload type %q, want %q", ErrStatement, e.PayloadType, payloadType)
	}
	// Package json ignores the case of field names and takes the last of several; another reader may take the first.
	if err := unambiguous(text); err != nil {
		return nil, nil, fmt.Errorf("%w: envelope: %w", ErrStatement, err)
	}
	if len(e.Signatures) > maxSignatures {
		return nil, nil, fmt.Errorf("%w: %d signatures, more than %d", ErrStatement, len(e.Signatures), maxSignatures)
	}
	if len(keys) == 0 {
		payload, err := e.DecodeB64Payload()
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrStatement, err)
		}
		s, err := decode(payload)
		return s, nil, err
	}
	var verifiers []dsse.Verifier
	seen := map[string]bool{} // the library prints a warning for a duplicate key
	for _, k := range keys {
		if k == nil || k.public == nil {
			return nil, nil, errNoKey
		}
		if !seen[k.id] {
			seen[k.id] = true
			verifiers = append(verifiers, party{k})
		}
	}
	verifier, err := dsse.NewEnvelopeVerifier(verifiers...)
	if err != nil {
		return nil, nil, err
	}
	// Decode exactly the bytes that the signature covers.
	accepted, payload, err := verifier.VerifyAndDecode(ctx, &e)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %s", ErrSignature, unaccepted(e.Signatures, keys))
	}
	var by []string
	for _, a := range accepted {
		by = append(by, a.KeyID)
	}
	s, err := decode(payload)
	return s, by, err
}

// unaccepted explains why no signature is by one of keys, of which there is at least one.
func unaccepted(signatures []dsse.Signature, keys []*Key) string {
	const named = 3
	var claimed, accepted []string
	for i, s := range signatures {
		for _, k := range keys {
			if s.KeyID == k.id {
				return "the signature by " + k.id + " does not match this text"
			}
		}
		if i < named {
			claimed = append(claimed, fmt.Sprintf("%.100q", s.KeyID))
		}
	}
	for _, k := range keys[:min(len(keys), named)] {
		accepted = append(accepted, k.id)
	}
	return fmt.Sprintf("%d signatures by %s; %d accepted keys: %s",
		len(signatures), strings.Join(claimed, ", "), len(keys), strings.Join(accepted, ", "))
}
