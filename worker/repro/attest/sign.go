// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// payloadType is what an envelope says that a statement is.
const payloadType = "application/vnd.in-toto+json"

// MaxFile bounds a file with a statement or with public keys, MaxKey one with a private key, in bytes.
const (
	MaxFile = 16 << 20
	MaxKey  = 1 << 20
)

// Sign returns the statement in an envelope with the signature of a private key
// (https://github.com/secure-systems-lab/dsse).
func Sign(ctx context.Context, s *Statement, k *Key) ([]byte, error) {
	if k.sign == nil {
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

// maxSignatures is how many signatures an envelope may have: each is tried with each key, over the whole text.
const maxSignatures = 100

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
	// The library reads fields in any case, and the last of two: another reader may take the other one.
	if err := unambiguous(text); err != nil {
		return nil, nil, fmt.Errorf("%w: envelope: %w", ErrStatement, err)
	}
	if len(e.Signatures) > maxSignatures {
		return nil, nil, fmt.Errorf("%w: the envelope has %d signatures, and may have %d", ErrStatement, len(e.Signatures), maxSignatures)
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
		return nil, nil, fmt.Errorf("%w: %s", ErrSignature, unaccepted(e.Signatures, keys))
	}
	var by []string
	for _, a := range accepted {
		by = append(by, a.KeyID)
	}
	s, err := Decode(payload)
	return s, by, err
}

// unaccepted says of signatures none of which is by one of keys, of which there are some, what they claim to be by.
func unaccepted(signatures []dsse.Signature, keys []*Key) string {
	const named = 3
	var claimed, accepted []string
	for i, s := range signatures {
		for _, k := range keys {
			if s.KeyID == k.id {
				return "the signature that names " + k.id + " is not by that key, or not of this text"
			}
		}
		if i < named {
			claimed = append(claimed, fmt.Sprintf("%.100q", s.KeyID))
		}
	}
	for _, k := range keys[:min(len(keys), named)] {
		accepted = append(accepted, k.id)
	}
	return fmt.Sprintf("%d signatures, which name %s; %d keys are accepted: %s", len(signatures), strings.Join(claimed, ", "), len(keys), strings.Join(accepted, ", "))
}
