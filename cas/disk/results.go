// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"google.golang.org/protobuf/proto"
)

// Lookup implements cas.ActionCache. It drops a damaged result and returns cas.ErrNotFound.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := cas.CheckDigests(action); err != nil {
		return nil, err
	}
	miss := fmt.Errorf("result of action %s: %w", action, cas.ErrNotFound)
	e, ok := s.use(result, action)
	if !ok {
		return nil, miss
	}
	b, err := s.cache.read(e)
	if isDropped(err) {
		return nil, miss
	} else if err != nil {
		return nil, fmt.Errorf("result of action %s: %w", action, err)
	}
	if isForgotten(b) {
		return nil, miss
	}
	r, ok := decodeResult(b)
	if !ok {
		_ = s.cache.damaged(e, b)
		return nil, miss
	}
	return r, nil
}

// Record implements cas.ActionCache.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	end, err := s.cache.beginPut(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := cas.CheckRecord(action, r); err != nil {
		return err
	}
	b, err := encodeResult(r)
	if err != nil {
		return fmt.Errorf("result of action %s: %w", action, err)
	}
	return s.replace(action, b)
}

// replace stores the encoded result of action.
func (s *Store) replace(action cas.Digest, b []byte) error {
	k, err := s.key(result, action)
	if err != nil {
		return err
	}
	it := s.cache.newItem(k, b)
	it.Next = true
	return s.cache.append([]segment.Item{it})
}

// Forget removes the result of action, as durably as Record adds one, and reports whether there was one. A concurrent
// Record may come before or after it.
func (s *Store) Forget(ctx context.Context, action cas.Digest) (bool, error) {
	_, err := s.Lookup(ctx, action)
	if errors.Is(err, cas.ErrNotFound) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return false, err
	}
	defer end()
	// A marker instead of removing the entry: a log may still hold an older result.
	return true, s.replace(action, checked([]byte{forgotten}))
}

// forgotten is the marker in place of a result. No encoded message begins with it.
const forgotten = 0

func isForgotten(b []byte) bool {
	return soundRecord(b) && len(b) == sha256.Size+1 && b[sha256.Size] == forgotten
}

// checked returns b with a checksum in front.
func checked(b []byte) []byte {
	return seal(append(make([]byte, sha256.Size), b...))
}

// encodeResult returns the stored form of r: a checksum, since a digest does not determine it, and the message.
func encodeResult(r *repb.ActionResult) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, sha256.Size), r)
	if err != nil {
		return nil, err
	}
	return seal(b), nil
}

// decodeResult is the inverse of encodeResult.
func decodeResult(b []byte) (r *repb.ActionResult, ok bool) {
	if !soundRecord(b) {
		return nil, false
	}
	r = new(repb.ActionResult)
	return r, proto.Unmarshal(b[sha256.Size:], r) == nil
}

// seal sets the checksum at the front of b.
func seal(b []byte) []byte {
	sum := sha256.Sum256(b[sha256.Size:])
	copy(b, sum[:])
	return b
}

// soundRecord reports whether the checksum of b is right.
func soundRecord(b []byte) bool {
	if len(b) < sha256.Size {
		return false
	}
	sum := sha256.Sum256(b[sha256.Size:])
	return bytes.Equal(sum[:], b[:sha256.Size])
}
