// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// maxSuspects limits the blobs of suspects; a new one may replace any of them.
const maxSuspects = 1 << 16

// suspects are the blobs that clients must put again although a store lists them. Until they are put again, or an unread
// one is read successfully, Missing reports them as absent. They are in memory only: after a restart, the next read
// finds unread ones again, and the next use sends others.
type suspects struct {
	mu       sync.Mutex
	unread   map[key]bool // guarded by mu; the upstream claims to have them but failed to deliver or to renew them
	unqueued map[key]bool // guarded by mu; they are local, but could not be queued
	// results are local results that could not be queued. Lookups find them, so nobody records them again: queueResults
	// queues them.
	results map[key]bool // guarded by mu
}

// addSuspect adds k to a set of suspects, which are locked.
func addSuspect(set map[key]bool, k key) {
	for old := range set {
		if len(set) < maxSuspects {
			break
		}
		delete(set, old)
	}
	set[k] = true
}

// recordFetch records the result of reading d from the upstream.
func (s *store) recordFetch(d cas.Digest, err error) {
	if err == nil {
		s.readable(d)
		return
	}
	if !absentOrCorrupt(err) {
		return
	}
	k := key{s.name, d}
	s.o.recent.forget(k)
	s.o.unsent.lost(&s.o.recent, s.name, d)
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	addSuspect(u.unread, k)
}

// notRenewed records blobs that are not local and that the upstream cannot renew.
func (s *store) notRenewed(ds []cas.Digest) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, d := range ds {
		addSuspect(u.unread, key{s.name, d})
	}
}

// notQueued records local blobs that nothing will send: putting them has returned an error.
func (s *store) notQueued(ds ...cas.Digest) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, d := range ds {
		addSuspect(u.unqueued, key{s.name, d})
	}
}

// resultNotQueued records a local result that nothing will send yet.
func (s *store) resultNotQueued(action cas.Digest) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	addSuspect(u.results, key{s.name, action})
}

// queueResults queues the results that could not be queued when they were recorded, or returns why it cannot.
func (o *Overlay) queueResults() error {
	u := &o.suspect
	u.mu.Lock()
	byInstance := map[string][]cas.Digest{}
	for k := range u.results {
		byInstance[k.instance] = append(byInstance[k.instance], k.digest)
	}
	clear(u.results)
	u.mu.Unlock()
	var failed error
	for instance, actions := range byInstance {
		if err := o.pending.add(result, instance, actions...); err != nil {
			failed = err
			u.mu.Lock()
			for _, d := range actions {
				addSuspect(u.results, key{instance, d})
			}
			u.mu.Unlock()
		}
	}
	return failed
}

// readable records that ds were read from the upstream, or were put again.
func (s *store) readable(ds ...cas.Digest) {
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.unread)+len(u.unqueued) == 0 {
		return
	}
	for _, d := range ds {
		delete(u.unread, key{s.name, d})
		delete(u.unqueued, key{s.name, d})
	}
}

// suspect returns the blobs of ds that clients must put again even if a store lists them: those that WriteThrough or an
// earlier WriteBack has not sent, those that could not be queued, and those among absent, which are not local, that the
// upstream failed to deliver.
func (s *store) suspect(ds, absent []cas.Digest) map[cas.Digest]bool {
	suspect := map[cas.Digest]bool{}
	s.o.unsent.has(s.name, ds, suspect)
	if s.o.leftover() {
		maps.Copy(suspect, s.o.pending.has(s.name, ds))
	}
	u := &s.o.suspect
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.unqueued) > 0 {
		for _, d := range ds {
			if u.unqueued[key{s.name, d}] {
				suspect[d] = true
			}
		}
	}
	if len(u.unread) == 0 {
		return suspect
	}
	for _, d := range absent {
		if u.unread[key{s.name, d}] {
			suspect[d] = true
		}
	}
	return suspect
}

// leftover reports whether pending has entries of an earlier WriteBack.
func (o *Overlay) leftover() bool { return o.pending != nil && o.config.Policy == WriteThrough }

func setOf(ds []cas.Digest) map[cas.Digest]bool {
	set := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		set[d] = true
	}
	return set
}

// selected returns the digests of ds that are in set, in order and without duplicates. It empties set.
func selected(ds []cas.Digest, set map[cas.Digest]bool) []cas.Digest {
	if len(set) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool {
		listed := set[d]
		delete(set, d)
		return !listed
	})
}

// without returns the digests of ds that are not in set.
func without(ds []cas.Digest, set map[cas.Digest]bool) []cas.Digest {
	if len(set) == 0 {
		return ds
	}
	return slices.DeleteFunc(slices.Clone(ds), func(d cas.Digest) bool { return set[d] })
}

// An upstreamReader reads a blob from the upstream, and records a failure.
type upstreamReader struct {
	io.ReadCloser
	ctx context.Context
	s   *store
	d   cas.Digest
	err error // of a read, except io.EOF
}

// openUpstream opens a blob in the upstream.
func (s *store) openUpstream(ctx context.Context, d cas.Digest, off int64) (*upstreamReader, error) {
	body, err := s.upstream.Store.Open(ctx, d, off)
	if err != nil {
		return nil, s.readError(ctx, d, err)
	}
	return &upstreamReader{ReadCloser: body, ctx: ctx, s: s, d: d}, nil
}

// Read implements io.Reader.
func (r *upstreamReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		r.err = r.s.readError(r.ctx, r.d, err)
		err = r.err
	}
	return n, err
}

// readError explains and records a failed upstream read of d. If the upstream still answers, and claims to have d, its
// copy is unreadable. The error is then cas.ErrCorrupt, as for any blob that must be put again, unless it is
// cas.ErrNotFound. An upstream that refuses or throttles reads says nothing about d.
func (s *store) readError(ctx context.Context, d cas.Digest, err error) error {
	if ctx.Err() != nil || errors.Is(err, cas.ErrRange) || errors.Is(err, os.ErrPermission) ||
		errors.Is(err, cas.ErrThrottled) {
		return err
	}
	if errors.Is(err, cas.ErrCorrupt) {
		s.unreadable(d, err)
		s.recordFetch(d, err)
		return err
	}
	kind, notFound := cas.ErrCorrupt, errors.Is(err, cas.ErrNotFound)
	if notFound {
		kind = cas.ErrNotFound
	}
	missing, down := s.upstream.Store.Missing(ctx, []cas.Digest{d})
	switch {
	case down != nil && !notFound:
		return err
	case len(missing) > 0:
		err = fmt.Errorf("blob %s: %w in the upstream", d, cas.ErrNotFound)
	case down == nil:
		err = fmt.Errorf("blob %s: %w: the upstream lists it but cannot deliver it: %v", d, kind, err)
		s.unreadable(d, err)
	}
	s.recordFetch(d, err)
	return err
}

// unreadable reports a blob that the upstream lists but cannot deliver.
func (s *store) unreadable(d cas.Digest, err error) {
	s.o.count(func(st *Stats) { st.Unreadable++ })
	s.o.warn("the upstream cannot deliver a blob that it lists; it is missing until it is uploaded again",
		"digest", d.String(), "instance", s.name, "err", err)
}
