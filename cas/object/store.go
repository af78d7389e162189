// SPDX-License-Identifier: Apache-2.0

package object

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"
)

// A Store is one instance of a bucket: a cas.Store and a cas.ActionCache. It is safe for concurrent use.
type Store struct {
	*Client
	name string
	dir  string // of its keys; ends with a slash
}

var (
	_ cas.Store       = (*Store)(nil)
	_ cas.Batcher     = (*Store)(nil)
	_ cas.ActionCache = (*Store)(nil)
)

// key returns the key of a blob, or of the result of an action.
func (s *Store) key(kind string, d cas.Digest) string {
	return s.dir + kind + "/" + d.Function().String() + "/" + d.Hash() + "-" + strconv.FormatInt(d.Size(), 10)
}

const (
	blobs   = "blobs"
	results = "results"
)

// maxName is the most bytes that the name of an instance takes in a key.
const maxName = 200

// escape returns the part of a key that stands for an instance. Different names have different parts. Its
// alphabet is a-z, 0-9, "-", "_" and "!", which is safe in every key, and in every path of a server that
// keeps its objects as files. The empty name is "!", and one too long is "!!" and its SHA-256.
func escape(name string) string {
	if name == "" {
		return "!"
	}
	var b strings.Builder
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "!%02x", c)
		}
	}
	if b.Len() <= maxName {
		return b.String()
	}
	sum := sha256.Sum256([]byte(name))
	return "!!" + hex.EncodeToString(sum[:])
}

// each calls f with 0 to n-1, some at once, and returns the first error.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for i := range n {
		group.Go(func() error { return f(ctx, i) })
	}
	return group.Wait()
}

// Missing implements cas.Store, with a call for each digest.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	var asked []cas.Digest
	seen := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if !seen[d] && !d.IsEmpty() {
			asked = append(asked, d)
		}
		seen[d] = true
	}
	return pick(ctx, asked, func(ctx context.Context, d cas.Digest) error {
		return s.present(ctx, d)
	})
}

// pick returns those of ds for which f is cas.ErrNotFound, in order.
func pick(ctx context.Context, ds []cas.Digest, f func(ctx context.Context, d cas.Digest) error) ([]cas.Digest, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	absent := make([]bool, len(ds))
	err := each(ctx, len(ds), func(ctx context.Context, i int) error {
		err := f(ctx, ds[i])
		if absent[i] = errors.Is(err, cas.ErrNotFound); absent[i] {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	var picked []cas.Digest
	for i, d := range ds {
		if absent[i] {
			picked = append(picked, d)
		}
	}
	return picked, nil
}

// present returns nil if the bucket has d and will keep it, and otherwise cas.ErrNotFound.
func (s *Store) present(ctx context.Context, d cas.Digest) error {
	key := s.key(blobs, d)
	what := fmt.Sprintf("find blob %s", d)
	info, err := s.core.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
	if err != nil {
		return s.failed(ctx, what, err)
	}
	// What is damaged is absent, for then it is put again.
	if info.Size != d.Size() || s.isDamaged(key) {
		return fmt.Errorf("%s in %s: it is damaged: %w", what, s.target, cas.ErrNotFound)
	}
	return s.keep(ctx, what, key, info)
}

// maxCopy is the size of the largest object, in bytes, that S3 copies in one call. Google copies any.
const maxCopy = 5 << 30

// keep makes an object new that the bucket's rule would delete too soon. What cannot be kept is
// cas.ErrNotFound.
func (s *Store) keep(ctx context.Context, what, key string, info minio.ObjectInfo) error {
	switch {
	case s.expire == 0 || time.Since(info.LastModified) < s.expire/2:
		return nil
	case info.Size > maxCopy && !s.google:
		return fmt.Errorf("%s in %s: it expires soon and is too large to be copied: %w", what, s.target, cas.ErrNotFound)
	}
	_, err := s.core.Client.CopyObject(ctx,
		minio.CopyDestOptions{Bucket: s.bucket, Object: key, ReplaceMetadata: true}, // without that, it would be no change
		minio.CopySrcOptions{Bucket: s.bucket, Object: key})
	if err != nil {
		return s.failed(ctx, what+" and keep it", err)
	}
	return nil
}

// Open implements cas.Store. It streams; a body that breaks off goes on where it was.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	what := fmt.Sprintf("read blob %s", d)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("%s in %s at offset %d: %w", what, s.target, off, cas.ErrRange)
	case d.IsEmpty():
		return io.NopCloser(bytes.NewReader(nil)), nil
	case off == d.Size():
		// No request can ask for nothing.
		if err := s.present(ctx, d); err != nil {
			return nil, err
		}
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	r, info, err := s.open(ctx, what, s.key(blobs, d), off)
	if err == nil && off+info.Size != d.Size() {
		r.Close()
		err = fmt.Errorf("%s in %s: the object has %d bytes: %w", what, s.target, off+info.Size, cas.ErrCorrupt)
	}
	switch {
	case errors.Is(err, cas.ErrCorrupt):
		s.setDamaged(d, true)
		return nil, err
	case err != nil:
		return nil, err
	case off > 0:
		return r, nil
	}
	return &verified{s: s, d: d, Reader: cas.Verify(d, r), Closer: r}, nil
}

// verified reads a whole blob, and remembers whether it was sound.
type verified struct {
	s *Store
	d cas.Digest
	io.Reader
	io.Closer
}

func (v *verified) Read(p []byte) (int, error) {
	n, err := v.Reader.Read(p)
	switch {
	case err == io.EOF:
		v.s.setDamaged(v.d, false)
	case errors.Is(err, cas.ErrCorrupt):
		v.s.setDamaged(v.d, true)
		err = fmt.Errorf("read blob %s in %s: %w", v.d, v.s.target, err)
	}
	return n, err
}

// setDamaged remembers whether the blob d is damaged, and tells of it if that is new.
func (s *Store) setDamaged(d cas.Digest, damaged bool) {
	key := s.key(blobs, d)
	s.mu.Lock()
	known := s.damaged[key]
	if damaged {
		s.damaged[key] = true
	} else {
		delete(s.damaged, key)
	}
	s.mu.Unlock()
	if damaged && !known && s.corrupt != nil {
		s.corrupt(s.name, d, key)
	}
}

func (s *Store) isDamaged(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.damaged[key]
}

// open returns a reader of an object from byte off, and what the bucket says of it: the size is that of
// what is left to be read.
func (s *Store) open(ctx context.Context, what, key string, off int64) (*reader, minio.ObjectInfo, error) {
	r := &reader{s: s, ctx: ctx, what: what, key: key, next: off}
	info, err := r.ask()
	if err == nil && info.Size < 0 {
		r.body.Close()
		err = errors.New("the answer does not say how long it is")
	}
	if err != nil {
		return nil, info, s.failed(ctx, what, err)
	}
	r.end = off + info.Size
	return r, info, nil
}

// A reader reads an object to its end. What the bytes are is not its business.
type reader struct {
	s         *Store
	ctx       context.Context
	what, key string
	next, end int64 // offsets of what is to be read next, and where it ends
	body      io.ReadCloser
	broken    int   // how many bodies in a row broke off early
	begun     int64 // offset at which this one began
}

// ask asks for the object from r.next on.
func (r *reader) ask() (minio.ObjectInfo, error) {
	var o minio.GetObjectOptions
	if r.next > 0 {
		if err := o.SetRange(r.next, 0); err != nil {
			return minio.ObjectInfo{}, err
		}
	}
	body, info, _, err := r.s.core.GetObject(r.ctx, r.s.bucket, r.key, o)
	r.body, r.begun = body, r.next
	return info, err
}

// progress is how many bytes a body must bring before it breaks off, for the next not to count as another attempt.
const progress = 1 << 20

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for r.next < r.end {
		n, err := r.body.Read(p)
		r.next += int64(n)
		if n > 0 || err == nil {
			return n, nil
		}
		if r.next-r.begun >= progress {
			r.broken = 0
		}
		r.broken++
		if r.ctx.Err() != nil || r.broken == attempts {
			return 0, r.s.failed(r.ctx, r.what, err)
		}
		r.body.Close()
		if _, err := r.ask(); err != nil {
			r.body = http.NoBody
			return 0, r.s.failed(r.ctx, r.what, err)
		}
	}
	return 0, io.EOF
}

// Close implements io.Closer.
func (r *reader) Close() error { return r.body.Close() }

// Fetch copies those of the blobs ds that another store lacks into it, some at once. It returns those that
// are absent here, too, in order and each once. After an error it may have copied some.
func (s *Store) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error) {
	lacking, err := to.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	return pick(ctx, lacking, func(ctx context.Context, d cas.Digest) error {
		r, err := s.Open(ctx, d, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return to.Put(ctx, d, r)
	})
}
