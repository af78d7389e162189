// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
)

// Lookup implements cas.ActionCache. A result whose file is damaged is removed, and cas.ErrNotFound.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	end, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	miss := fmt.Errorf("result of action %s: %w", action, cas.ErrNotFound)
	e := s.cache.use(s.key(result, action), false)
	if e == nil {
		return nil, miss
	}
	b, err := readQuietly(s.cache.path(e.key))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("result of action %s: %w", action, err)
	}
	r, ok := decodeResult(b)
	if !ok {
		s.cache.lose(e)
		return nil, miss
	}
	return r, nil
}

// Record implements cas.ActionCache.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	end, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	b, err := encodeResult(r)
	if err != nil {
		return fmt.Errorf("result of action %s: %w", action, err)
	}
	_, err = s.cache.put(s.key(result, action), int64(len(b)), false, func(f *draft) error {
		_, err := f.Write(b)
		return err
	})
	return err
}

// encodeResult returns the content of the file of r: a result, unlike a blob, is not named by its
// content, so it brings its own checksum.
func encodeResult(r *repb.ActionResult) ([]byte, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(make([]byte, sha256.Size), r)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b[sha256.Size:])
	copy(b, sum[:])
	return b, nil
}

// decodeResult is the inverse of encodeResult; ok is false if b is anything else.
func decodeResult(b []byte) (r *repb.ActionResult, ok bool) {
	if len(b) < sha256.Size {
		return nil, false
	}
	sum := sha256.Sum256(b[sha256.Size:])
	r = new(repb.ActionResult)
	return r, bytes.Equal(sum[:], b[:sha256.Size]) && proto.Unmarshal(b[sha256.Size:], r) == nil
}
