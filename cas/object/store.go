// SPDX-License-Identifier: Apache-2.0

package object

import (
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

// A Store is one instance in a bucket: a cas.Store and a cas.ActionCache. It is safe for concurrent use. Use
// Client.Store; the zero Store is not usable.
type Store struct {
	*Client
	name string
	dir  string // of its keys, with a trailing slash
}

var (
	_ cas.Store       = (*Store)(nil)
	_ cas.Batcher     = (*Store)(nil)
	_ cas.Renewer     = (*Store)(nil)
	_ cas.ActionCache = (*Store)(nil)
)

// key returns the key of a blob or of the result of an action.
func (s *Store) key(kind string, d cas.Digest) string {
	return s.dir + kind + "/" + d.Function().String() + "/" + d.Hash() + "-" + strconv.FormatInt(d.Size(), 10)
}

const (
	blobs   = "blobs"
	results = "results"
)

// maxName is the maximum length of an escaped instance name in bytes.
const maxName = 200

// escape returns the part of a key for an instance. It is unique to the name. It consists of a-z, 0-9, "-", "_" and
// "!", which are safe in keys, and in the paths of servers that store objects as files. The empty name is "!", and a
// name that is too long is "!!" and its SHA-256.
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

// each calls f with 0 to n-1, some in parallel, and returns the first error.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for i := range n {
		group.Go(func() error { return f(ctx, i) })
	}
	return group.Wait()
}

// Missing implements cas.Store with a call for each digest.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.missing(ctx, ds, s.present)
}

// An instance is a Store with Absent and RenewResult, optional methods that package overlay uses.
type instance struct{ *Store }

// Unwrap implements cas.Unwrapper.
func (s instance) Unwrap() cas.Store { return s.Store }

// Absent is Missing without renewals, so that no copy of an object delays it.
func (s instance) Absent(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.missing(ctx, ds, func(ctx context.Context, d cas.Digest) error {
		_, err := s.find(ctx, fmt.Sprintf("find blob %s", d), d)
		return err
	})
}

// RenewResult is Lookup, but returns cas.ErrUpstreamFull if the bucket is too full to renew the result.
func (s instance) RenewResult(ctx context.Context, action cas.Digest) error {
	_, err := s.lookup(ctx, action)
	return err
}

// missing returns the digests of ds for which present returns cas.ErrNotFound, in order and without duplicates.
func (s *Store) missing(ctx context.Context, ds []cas.Digest, present func(context.Context, cas.Digest) error) (
	[]cas.Digest, error,
) {
	if err := cas.CheckDigests(ds...); err != nil {
		return nil, err
	}
	var query []cas.Digest
	seen := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if !seen[d] && !d.IsEmpty() {
			query = append(query, d)
		}
		seen[d] = true
	}
	return absentOf(ctx, query, present)
}

// absentOf returns the digests of ds for which f returns cas.ErrNotFound, in order.
func absentOf(ctx context.Context, ds []cas.Digest, f func(context.Context, cas.Digest) error) ([]cas.Digest, error) {
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
	var digests []cas.Digest
	for i, d := range ds {
		if absent[i] {
			digests = append(digests, d)
		}
	}
	return digests, nil
}

// present returns nil if the bucket has d and keeps it, and otherwise cas.ErrNotFound. It also returns nil if the
// bucket is too full to renew d: the blob is readable until it expires, and a full bucket accepts no upload in its
// place.
func (s *Store) present(ctx context.Context, d cas.Digest) error {
	what := fmt.Sprintf("find blob %s", d)
	info, err := s.find(ctx, what, d)
	if err != nil {
		return err
	}
	return ignore(s.renew(ctx, what, s.key(blobs, d), info), cas.ErrUpstreamFull)
}

// renewed is present, but returns cas.ErrUpstreamFull if the bucket is too full to renew d.
func (s *Store) renewed(ctx context.Context, d cas.Digest) error {
	what := fmt.Sprintf("find blob %s", d)
	info, err := s.find(ctx, what, d)
	if err != nil {
		return err
	}
	return s.renew(ctx, what, s.key(blobs, d), info)
}

// find returns the metadata of the object of d, or cas.ErrNotFound if it is absent or unusable.
func (s *Store) find(ctx context.Context, what string, d cas.Digest) (info minio.ObjectInfo, err error) {
	key := s.key(blobs, d)
	var denied bool
	err = s.do(ctx, "head", what, func(ctx context.Context) (err error) {
		info, err = s.core.StatObject(ctx, s.bucket, key, minio.StatObjectOptions{})
		denied = minio.ToErrorResponse(err).Code == minio.AccessDenied
		return err
	})
	alone, err := s.failsAlone(ctx, what, err)
	if denied && errors.Is(err, cas.ErrDenied) {
		alone, err = s.deniedAlone(ctx, what, err)
	}
	if alone {
		// A response to HEAD has no body, which would tell damage from throttling, and a refused object from a wrong
		// clock.
		var r *reader
		if r, info, err = s.open(ctx, what, key, 0); err == nil {
			err = r.Close()
		} else if ofObject(err) || isRefused(err) {
			err = unusable(err)
		}
	}
	if err != nil {
		return info, err
	}
	// A damaged blob counts as absent, so that it is put again.
	if info.Size != d.Size() || s.isDamaged(key) {
		return info, fmt.Errorf("%s in %s: the object is damaged: %w", what, s.target, cas.ErrNotFound)
	}
	return info, nil
}

// maxCopy is the size in bytes of the largest object that S3 copies in one call. Google has no limit.
const maxCopy = 5 << 30

// renew copies an object onto itself if the lifecycle rule would delete it too soon. An object that cannot be renewed
// is cas.ErrNotFound, or cas.ErrUpstreamFull if only space is missing.
func (s *Store) renew(ctx context.Context, what, key string, info minio.ObjectInfo) error {
	switch {
	case !s.expires(info.LastModified):
		return nil
	case info.Size > maxCopy && !s.google:
		return fmt.Errorf("%s in %s: it expires soon and is too large to be renewed: %w", what, s.target,
			cas.ErrNotFound)
	}
	var copied minio.UploadInfo
	var denied bool
	what += " and renew it"
	err := s.doCopy(ctx, "copy", what, info.Size, func(ctx context.Context) (err error) {
		copied, err = s.core.Client.CopyObject(ctx,
			// S3 rejects a copy without any change
			minio.CopyDestOptions{Bucket: s.bucket, Object: key, ReplaceMetadata: true},
			minio.CopySrcOptions{Bucket: s.bucket, Object: key})
		denied = minio.ToErrorResponse(err).Code == minio.AccessDenied
		return err
	})
	if err == nil && !copied.LastModified.IsZero() && s.expires(copied.LastModified) {
		// Some servers only replace the metadata.
		return fmt.Errorf("%s in %s: it expires soon and copying does not renew it: %w", what, s.target, cas.ErrNotFound)
	}
	alone, err := s.failsAlone(ctx, what, err)
	if denied && errors.Is(err, cas.ErrDenied) {
		alone, err = s.deniedAlone(ctx, what, err)
	}
	// Without space, a copy may succeed later; of an object that is too large for one call, it never does.
	if alone || errors.Is(err, cas.ErrUpstreamFull) && errors.Is(err, errors.ErrUnsupported) {
		err = unusable(err)
	}
	return err
}

// deniedAlone reports whether err, with which the bucket denied a query or a copy of an object, concerns that object
// only: the bucket permits reads and writes. The object may have another owner, or access to its encryption key was
// revoked; a new upload then replaces the object. If reads or writes fail, too, an upload would not help, so
// deniedAlone returns the error of the probe, and queries fail with it.
func (s *Store) deniedAlone(ctx context.Context, what string, err error) (bool, error) {
	if failed := s.probeUploads(ctx); failed != nil {
		return false, fmt.Errorf("%s: %w", what, failed)
	}
	return true, err
}

// failsAlone reports whether err, of a call about one object, concerns that object only: the bucket answers a probe. It
// returns the error of a failed probe, otherwise err. The error of a probe is more specific: a response to HEAD does
// not distinguish expired credentials from a malformed request.
func (s *Store) failsAlone(ctx context.Context, what string, err error) (bool, error) {
	if !ofObject(err) {
		return false, err
	}
	if failed := s.health.Probe(ctx); failed != nil {
		return false, fmt.Errorf("%s: %w", what, failed)
	}
	return true, err
}

// unusable returns err, which is about one object, as cas.ErrNotFound: the object is to be put again, and must not fail
// calls that name others, too.
func unusable(err error) error {
	return fmt.Errorf("%w: the bucket fails for this object: %v", cas.ErrNotFound, err)
}

// expires reports whether the lifecycle rule deletes an object of this age within half of its lifetime.
func (s *Store) expires(modified time.Time) bool {
	return s.expire > 0 && time.Since(modified) >= s.expire/2
}

// Lifetime implements cas.Renewer.
func (s *Store) Lifetime() time.Duration { return s.expire }

// Renew implements cas.Renewer. Missing renews, too, but does not fail if the bucket is full.
func (s *Store) Renew(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	return s.missing(ctx, ds, s.renewed)
}

// Open implements cas.Store. It streams, and resumes a download that breaks off. It verifies only a download from
// offset 0.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := cas.CheckDigests(d); err != nil {
		return nil, err
	}
	what := fmt.Sprintf("read blob %s", d)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("%s in %s at offset %d: %w", what, s.target, off, cas.ErrRange)
	case d.IsEmpty():
		return http.NoBody, nil
	case off == d.Size():
		// A range request cannot be empty.
		if err := s.present(ctx, d); err != nil {
			return nil, err
		}
		return http.NoBody, nil
	}
	r, info, err := s.open(ctx, what, s.key(blobs, d), off)
	if isRefused(err) && s.health.Probe(ctx) == nil {
		// For example, access to its encryption key was revoked. The object stays unreadable until it is uploaded again.
		err = fmt.Errorf("%w: the bucket refuses reads of this object only: %v", cas.ErrCorrupt, err)
	}
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

// A verified reader reads a whole blob, and records whether it is damaged.
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

// maxDamaged limits Client.damaged. Beyond it, a new key replaces an arbitrary one, which the next read of its blob
// adds again.
const maxDamaged = 1 << 16

// setDamaged records whether the blob d is damaged, and reports a newly damaged blob to Config.Corrupt.
func (s *Store) setDamaged(d cas.Digest, damaged bool) {
	key := s.key(blobs, d)
	s.mu.Lock()
	known := s.damaged[key]
	if damaged {
		for old := range s.damaged {
			if known || len(s.damaged) < maxDamaged {
				break
			}
			delete(s.damaged, old)
		}
		s.damaged[key] = true
	} else {
		delete(s.damaged, key)
	}
	s.mu.Unlock()
	if damaged && !known && s.config.Corrupt != nil {
		s.config.Corrupt(s.name, d, key)
	}
}

func (s *Store) isDamaged(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.damaged[key]
}

// open returns a reader of an object from the offset off, and its metadata, in which the size counts from off.
func (s *Store) open(ctx context.Context, what, key string, off int64) (*reader, minio.ObjectInfo, error) {
	r := &reader{s: s, ctx: ctx, what: what, key: key, next: off}
	info, err := r.request()
	if err != nil {
		return nil, info, err
	}
	r.end = off + info.Size
	return r, info, nil
}

// A reader reads an object to its end. It does not verify it.
type reader struct {
	s         *Store
	ctx       context.Context
	what, key string
	next, end int64 // offsets
	call      *call
	body      io.ReadCloser
	broken    int   // number of consecutive bodies that broke off early
	begun     int64 // offset at which the current body began
}

// request begins a call for the object from r.next on. After an error, r has no body.
func (r *reader) request() (info minio.ObjectInfo, err error) {
	r.body, r.begun = http.NoBody, r.next
	r.call = r.s.newCall(r.ctx, "get")
	if err := r.s.health.Ready(r.ctx); err != nil {
		return info, r.call.end(fmt.Errorf("%s: %w", r.what, err))
	}
	var o minio.GetObjectOptions
	if r.next > 0 {
		err = o.SetRange(r.next, 0)
	}
	var body io.ReadCloser
	if err == nil {
		body, info, _, err = r.s.core.GetObject(r.call.own, r.s.bucket, r.key, o)
	}
	if err == nil && info.Size < 0 {
		body.Close()
		err = errors.New("the response has no length")
	}
	answer, _ := errors.AsType[minio.ErrorResponse](err)
	if err = r.call.answered(r.what, err); err != nil {
		if answer.Code == minio.AccessDenied && errors.Is(err, cas.ErrDenied) {
			err = &refused{err}
		}
		return info, r.call.end(err)
	}
	r.body = body
	return info, nil
}

// progress is the number of received bytes that resets the count of attempts when a body breaks off.
const progress = 1 << 20

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for r.next < r.end {
		if err := r.ctx.Err(); err != nil {
			return 0, r.s.wrap(r.ctx, r.what, err)
		}
		start := time.Now()
		n, err := r.body.Read(p)
		r.next += int64(n)
		if n > 0 || err == nil {
			return n, nil
		}
		if r.next-r.begun >= progress {
			r.broken = 0
		}
		r.broken++
		err = r.s.wrap(r.ctx, r.what, err)
		r.s.health.Observe(r.ctx, start, err)
		r.body.Close()
		_ = r.call.end(err)
		if r.ctx.Err() != nil || r.broken == attempts {
			r.body = http.NoBody
			return 0, err
		}
		if _, err := r.request(); err != nil {
			return 0, err
		}
	}
	return 0, io.EOF
}

// Close implements io.Closer.
func (r *reader) Close() error {
	err := r.body.Close()
	if r.body != http.NoBody {
		_ = r.call.end(nil)
	}
	r.body = http.NoBody
	return err
}

// Fetch copies those of ds that another store lacks to that store, some in parallel. It returns the blobs that both
// stores lack, in order and without duplicates. After an error it may have copied some.
func (s *Store) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error) {
	missing, err := to.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	return absentOf(ctx, missing, func(ctx context.Context, d cas.Digest) error {
		r, err := s.Open(ctx, d, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return to.Put(ctx, d, r)
	})
}
