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

// Lookup implements cas.ActionCache. A result that is damaged is cas.ErrNotFound from then on.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	miss := fmt.Errorf("result of action %s: %w", action, cas.ErrNotFound)
	e, ok := s.use(result, action)
	if !ok {
		return nil, miss
	}
	b, err := s.cache.read(e)
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
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
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return err
	}
	defer end()
	b, err := encodeResult(r)
	if err != nil {
		return fmt.Errorf("result of action %s: %w", action, err)
	}
	return s.replace(action, b)
}

// replace stores what encodeResult has made, in place of what is there for action.
func (s *Store) replace(action cas.Digest, b []byte) error {
	k, err := s.key(result, action)
	if err != nil {
		return err
	}
	it := item(k, b)
	it.Next = true
	return s.cache.append([]segment.Item{it})
}

// Forget makes the result recorded for action absent, as durably as Record makes one present, and reports whether there
// was one. A Record at the same time may come before or after.
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
	// An entry that says so, and not the removal of one: the log may still tell of an older result.
	return true, s.replace(action, checked([]byte{forgotten}))
}

// forgotten stands where a result would. No encoded message begins with it.
const forgotten = 0

func isForgotten(b []byte) bool {
	return soundRecord(b) && len(b) == sha256.Size+1 && b[sha256.Size] == forgotten
}

// checked returns b behind its checksum.
func checked(b []byte) []byte {
	return seal(append(make([]byte, sha256.Size), b...))
}

// encodeResult returns what is stored of r: a result, unlike a blob, is not named by its content, so it brings its
// own checksum.
func encodeResult(r *repb.ActionResult) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, sha256.Size), r)
	if err != nil {
		return nil, err
	}
	return seal(b), nil
}

// decodeResult is the inverse of encodeResult; ok is false if b is anything else.
func decodeResult(b []byte) (r *repb.ActionResult, ok bool) {
	if !soundRecord(b) {
		return nil, false
	}
	r = new(repb.ActionResult)
	return r, proto.Unmarshal(b[sha256.Size:], r) == nil
}

// seal writes the checksum of the rest of b where it belongs.
func seal(b []byte) []byte {
	sum := sha256.Sum256(b[sha256.Size:])
	copy(b, sum[:])
	return b
}

// soundRecord reports whether b is as seal has left it.
func soundRecord(b []byte) bool {
	if len(b) < sha256.Size {
		return false
	}
	sum := sha256.Sum256(b[sha256.Size:])
	return bytes.Equal(sum[:], b[:sha256.Size])
}
