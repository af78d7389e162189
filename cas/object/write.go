// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"cmp"
	"context"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/minio/minio-go/v7"
)

const (
	partCalls = 3                  // for a part, and for completing an upload
	partWait  = 20 * time.Second   // for the bucket to recover before another of these calls
	partBytes = 16 << 20           // of one request
	maxBytes  = 10_000 * partBytes // of an object: the maximum number of parts at S3
	abortTime = 30 * time.Second   // timeout of the call that removes parts
	smallBlob = 1 << 20            // maximum size of blobs that do not wait for larger ones

	// maxSmall and maxLarge limit the bytes of all running requests with small blobs and with larger ones. Each byte is in
	// memory twice, here and in bodyCopier.
	maxSmall = 16 * smallBlob
	maxLarge = 8 * partBytes
)

// Put implements cas.Store. It always writes, so that the object is new. It uploads a blob above 16 MiB in parts,
// sequentially. A blob above 156 GiB fails with both cas.ErrUpstreamFull and errors.ErrUnsupported, and so does
// one whose requests exceed a limit of the server or of a proxy.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := cas.CheckDigests(d); err != nil {
		return err
	}
	what := fmt.Sprintf("store blob %s", d)
	if d.Size() > maxBytes {
		return fmt.Errorf("%s in %s: objects have at most %d bytes: %w (%w)", what, s.target, int64(maxBytes),
			cas.ErrUpstreamFull, errors.ErrUnsupported)
	}
	if err := s.health.Ready(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	key, src := s.key(blobs, d), &source{d: d, r: r, h: d.Function().New(d.Size())}
	var err error
	if d.Size() > partBytes {
		err = s.putParts(ctx, what, key, src)
	} else {
		err = s.inMemory(ctx, what, src, func(data []byte) error {
			if d.IsEmpty() {
				return nil
			}
			return s.putWhole(ctx, what, key, data)
		})
	}
	if err != nil {
		return err
	}
	s.setDamaged(d, false)
	return nil
}

// inMemory calls send with the next part of src when there is memory for it. An upload in parts holds no memory between
// parts, so that uploads take turns, and small blobs have memory of their own.
func (s *Store) inMemory(ctx context.Context, what string, src *source, send func(data []byte) error) error {
	memory, size := s.large, src.nextSize()
	if src.d.Size() <= smallBlob {
		memory = s.small
	}
	if err := memory.Acquire(ctx, size); err != nil {
		return fmt.Errorf("%s in %s: %w", what, s.target, err)
	}
	defer memory.Release(size)
	data, err := src.next()
	if err != nil {
		return err
	}
	return send(data)
}

// PutAll implements cas.Batcher with parallel calls: no call stores two blobs.
func (s *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	_ = each(ctx, len(blobs), func(ctx context.Context, i int) error {
		errs[i] = s.Put(ctx, blobs[i].Digest, bytes.NewReader(blobs[i].Data))
		return nil
	})
	return errs
}

// Calls returns how many calls of PutAll run in parallel.
func (s *Store) Calls() int { return parallel }

// putWhole uploads an object with one call.
func (s *Store) putWhole(ctx context.Context, what, key string, data []byte) error {
	md5Sum, sha256Sum := s.sums(data)
	o := minio.PutObjectOptions{DisableContentSha256: true} // the signature covers the sum of the payload
	return s.do(ctx, "put", what, func(ctx context.Context) error {
		_, err := s.core.PutObject(ctx, s.bucket, key, bytes.NewReader(data), int64(len(data)), md5Sum, sha256Sum, o)
		return err
	})
}

// sums returns the checksums of data that the server verifies: MD5, without which Amazon refuses uploads to buckets with
// object lock, and at Amazon SHA-256.
func (c *Client) sums(data []byte) (md5Base64, sha256Hex string) {
	old := md5.Sum(data)
	md5Base64 = base64.StdEncoding.EncodeToString(old[:])
	if !c.google {
		sum := sha256.Sum256(data)
		sha256Hex = hex.EncodeToString(sum[:])
	}
	return md5Base64, sha256Hex
}

// uploadHeader is the metadata key under which an object that was uploaded in parts has the name of the upload.
const uploadHeader = "Upload"

// putParts uploads an object in parts, which the last call combines.
func (s *Store) putParts(ctx context.Context, what, key string, src *source) error {
	u := &upload{s: s, what: what, key: key, name: rand.Text()}
	err := s.do(ctx, "begin", what, func(ctx context.Context) (err error) {
		o := minio.PutObjectOptions{UserMetadata: map[string]string{uploadHeader: u.name}}
		u.id, err = s.core.NewMultipartUpload(ctx, s.bucket, key, o)
		return err
	})
	if err != nil {
		return err
	}
	parts, err := u.sendParts(ctx, src)
	if err == nil {
		err = s.insist(ctx, func() error { return u.complete(ctx, src.d.Size(), parts) })
	}
	if err == nil {
		return nil
	}
	// Parts cost money until the upload is aborted. If this call fails, the lifecycle rule aborts it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTime)
	defer cancel()
	var gone bool // the bucket knows no such upload
	abortErr := s.do(ctx, "abort", what, func(ctx context.Context) error {
		err := s.core.AbortMultipartUpload(ctx, s.bucket, key, u.id)
		gone = minio.ToErrorResponse(err).Code == minio.NoSuchUpload
		return err
	})
	if abortErr != nil && !gone { // %v: err alone determines the kind of the error
		err = fmt.Errorf("%w; its parts stay in the bucket until a lifecycle rule removes them: abort: %v", err, abortErr)
	}
	return err
}

// An upload is an upload in parts. The bucket assigns its id, which it forgets at the end; the object keeps its name.
type upload struct {
	s                   *Store
	what, key, id, name string
}

// insist calls f, which makes a call of an upload in parts. If the bucket is unavailable, it waits and retries: a short
// outage must not discard the parts that the bucket has.
func (s *Store) insist(ctx context.Context, f func() error) error {
	for n := 1; ; n++ {
		err := f()
		if n == partCalls || !errors.Is(err, cas.ErrUnavailable) || s.health.Await(ctx, partWait) != nil {
			return err
		}
	}
}

// complete combines the parts. If the bucket has done so but the response was lost, a repeated call finds no upload. So
// after an error, complete checks whether the object has the name of this upload. An earlier object, which may be
// damaged, has another one.
func (u *upload) complete(ctx context.Context, size int64, parts []minio.CompletePart) error {
	var gone bool // the bucket knows no such upload
	err := u.s.doCopy(ctx, "complete", u.what, size, func(ctx context.Context) error {
		_, err := u.s.core.CompleteMultipartUpload(ctx, u.s.bucket, u.key, u.id, parts, minio.PutObjectOptions{})
		gone = minio.ToErrorResponse(err).Code == minio.NoSuchUpload
		return err
	})
	if err == nil || !gone && !errors.Is(err, cas.ErrUnavailable) {
		return err
	}
	var info minio.ObjectInfo
	absent := u.s.do(ctx, "head", u.what, func(ctx context.Context) (err error) {
		info, err = u.s.core.StatObject(ctx, u.s.bucket, u.key, minio.StatObjectOptions{})
		return err
	})
	name := cmp.Or(info.Headers.Get("X-Amz-Meta-"+uploadHeader), info.Headers.Get("X-Goog-Meta-"+uploadHeader))
	if absent == nil && info.Size == size && name == u.name {
		return nil
	}
	return err
}

func (u *upload) sendParts(ctx context.Context, src *source) ([]minio.CompletePart, error) {
	var parts []minio.CompletePart
	for src.n < src.d.Size() {
		var part minio.ObjectPart
		err := u.s.inMemory(ctx, u.what, src, func(data []byte) error {
			md5Sum, sha256Sum := u.s.sums(data)
			o := minio.PutObjectPartOptions{Md5Base64: md5Sum, Sha256Hex: sha256Sum, DisableContentSha256: true}
			return u.s.insist(ctx, func() error {
				return u.s.do(ctx, "part", u.what, func(ctx context.Context) (err error) {
					part, err = u.s.core.PutObjectPart(ctx, u.s.bucket, u.key, u.id, len(parts)+1,
						bytes.NewReader(data), int64(len(data)), o)
					return err
				})
			})
		})
		if err != nil {
			return nil, err
		}
		parts = append(parts, minio.CompletePart{PartNumber: part.PartNumber, ETag: part.ETag})
	}
	return parts, nil
}

// A source reads a blob, and verifies it at the end: a mismatch is cas.ErrMismatch.
type source struct {
	d cas.Digest
	r io.Reader
	h hash.Hash
	n int64 // bytes read
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	s.n += int64(n)
	if s.n > s.d.Size() {
		return 0, cas.Mismatch(s.d, cas.Digest{})
	}
	if err == io.EOF {
		if got := s.d.Function().Digest(s.h, s.n); got != s.d {
			return 0, cas.Mismatch(s.d, got)
		}
	}
	return n, err
}

// nextSize returns the size of the next part in bytes.
func (s *source) nextSize() int64 { return min(s.d.Size()-s.n, partBytes) }

// next returns the next part, in new memory. It verifies the blob after the last part.
func (s *source) next() ([]byte, error) {
	var r io.Reader = s
	size := s.nextSize()
	if size < s.d.Size()-s.n {
		r = io.LimitReader(s, size)
	}
	var part bytes.Buffer
	part.Grow(int(size) + bytes.MinRead) // for ReadFrom to find the end
	_, err := part.ReadFrom(r)
	return part.Bytes(), err
}
