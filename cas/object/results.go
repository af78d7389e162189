// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
)

// maxResult is the maximum size in bytes of the object of a result.
const maxResult = sha256.Size + cas.MaxMessage

// Lookup implements cas.ActionCache. It renews the result, unless the bucket is full. A result that is damaged or
// cannot be renewed is cas.ErrNotFound.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	r, err := s.lookup(ctx, action)
	if r != nil {
		err = nil // it stays until it expires
	}
	return r, err
}

// lookup is Lookup, but also returns cas.ErrUpstreamFull with a result that the bucket is too full to renew.
func (s *Store) lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	what, key := fmt.Sprintf("look up the result of action %s", action), s.key(results, action)
	if err := cas.CheckDigests(action); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	r, info, err := s.open(ctx, what, key, 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxResult))
	if err != nil {
		return nil, err
	}
	result, ok := decode(b)
	if !ok {
		return nil, fmt.Errorf("%s in %s: the object is damaged: %w", what, s.target, cas.ErrNotFound)
	}
	err = s.renew(ctx, what, key, info)
	if err != nil && !errors.Is(err, cas.ErrUpstreamFull) {
		return nil, err
	}
	return result, err
}

// Record implements cas.ActionCache.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	what := fmt.Sprintf("record the result of action %s", action)
	if err := cas.CheckRecord(action, r); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	b, err := encode(r)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.putWhole(ctx, what, s.key(results, action), b)
}

// encode returns the object of a result: the SHA-256 of the message, which its key does not contain, and the message.
func encode(r *repb.ActionResult) ([]byte, error) {
	message, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	sum := sha256.Sum256(message)
	return append(sum[:], message...), err
}

// decode is the inverse of encode; ok is false for invalid objects.
func decode(b []byte) (r *repb.ActionResult, ok bool) {
	if len(b) < sha256.Size {
		return nil, false
	}
	want, message := b[:sha256.Size], b[sha256.Size:]
	sum := sha256.Sum256(message)
	r = new(repb.ActionResult)
	return r, bytes.Equal(sum[:], want) && cas.CheckMessage(message, r) == nil && proto.Unmarshal(message, r) == nil
}
