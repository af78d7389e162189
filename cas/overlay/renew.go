// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	renewBatch   = 100         // most blobs and results that are renewed in one round
	renewPause   = time.Second // between rounds
	renewFailure = time.Minute // pause after the upstream or every entry failed
	samplePause  = time.Minute // between samples
	sampleSize   = 16          // blobs of a sample
	maxDue       = 1 << 16     // blobs and results that wait to be renewed
	filterBits   = 1 << 25     // 4 MiB
)

// uses are the blobs and results that were used locally. The upstream does not see these uses, and would delete the
// blobs that are used most. The first use in an interval renews a blob or result in the upstream. A sample of later
// uses is checked, because somebody may have emptied the upstream.
//
// Nothing is persistent: after a restart, the first use of each blob renews it.
type uses struct {
	interval time.Duration // negative if nothing is renewed
	added    chan struct{} // has a token after additions to due or sample; capacity 1

	mu     sync.Mutex
	began  time.Time    // guarded by mu; of the interval
	seed   maphash.Seed // guarded by mu; differs in each interval
	seen   []uint64     // guarded by mu; a bit for each hash used; blobs that share one rarely share the next
	due    []entry      // guarded by mu
	sample []entry      // guarded by mu; of later uses
	later  int          // guarded by mu; uses of which sample is a sample
	// latest are hashes of uses since the last sample was taken. A batch and an input root use each blob twice, when it is
	// found and when it is read, and the second use must not cost a cache miss.
	latest  [1 << 12]uint64 // guarded by mu
	sampled time.Time       // guarded by mu; when the last sample was taken
}

func newUses(interval time.Duration) *uses {
	u := &uses{interval: interval, added: make(chan struct{}, 1), sampled: time.Now()}
	if interval > 0 {
		u.restart()
	}
	return u
}

// restart begins an interval. The caller holds mu, or has exclusive access.
func (u *uses) restart() {
	u.began, u.seed, u.seen = time.Now(), maphash.MakeSeed(), make([]uint64, filterBits/64)
}

// hash returns the hash of e in this interval. The caller holds mu.
func (u *uses) hash(e entry) uint64 { return maphash.Comparable(u.seed, e) }

// saw reports whether an entry was seen in this interval. The caller holds mu.
func (u *uses) saw(hash uint64) bool {
	bit := hash % filterBits
	return u.seen[bit/64]&(1<<(bit%64)) != 0
}

// see records that an entry was seen in this interval. The caller holds mu.
func (u *uses) see(hash uint64) {
	bit := hash % filterBits
	u.seen[bit/64] |= 1 << (bit % 64)
}

// unsee makes the next use of e renew it again.
func (u *uses) unsee(e entry) {
	u.mu.Lock()
	defer u.mu.Unlock()
	bit := u.hash(e) % filterBits
	u.seen[bit/64] &^= 1 << (bit % 64)
}

// add records uses of ds. It returns the digests that are due for renewal but do not fit into the queue. Unless the
// caller renews them, they remain due until their next use.
func (u *uses) add(kind kind, instance string, ds ...cas.Digest) (unqueued []cas.Digest) {
	if u.interval <= 0 {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if time.Since(u.began) >= u.interval {
		u.restart()
	}
	for _, d := range ds {
		e := entry{kind, instance, d}
		hash := u.hash(e)
		latest := &u.latest[hash>>32%uint64(len(u.latest))]
		switch {
		case d.IsEmpty() || *latest == hash:
		case !u.saw(hash):
			if len(u.due) >= maxDue {
				unqueued = append(unqueued, d)
				continue
			}
			u.see(hash)
			u.due = append(u.due, e)
		case kind == blob:
			*latest = hash
			u.later++
			if len(u.sample) < sampleSize {
				u.sample = append(u.sample, e)
			} else if i := rand.IntN(u.later); i < sampleSize {
				u.sample[i] = e
			}
		}
	}
	if len(u.due)+len(u.sample) > 0 {
		select {
		case u.added <- struct{}{}:
		default:
		}
	}
	return unqueued
}

// renewed records that the upstream has received ds or will receive them soon.
func (u *uses) renewed(kind kind, instance string, ds ...cas.Digest) {
	if u.interval <= 0 {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, d := range ds {
		u.see(u.hash(entry{kind, instance, d}))
	}
}

// take removes up to n entries to renew and, every samplePause, those to check.
func (u *uses) take(n int) (due, sample []entry) {
	u.mu.Lock()
	defer u.mu.Unlock()
	n = min(len(u.due), n)
	due, u.due = u.due[:n:n], u.due[n:]
	if time.Since(u.sampled) >= samplePause {
		sample = u.sample
		u.sample, u.later, u.sampled = nil, 0, time.Now()
		clear(u.latest[:])
	}
	return due, sample
}

// retry takes back entries that could not be renewed.
func (u *uses) retry(due []entry) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.due = append(u.due, due[:min(len(due), maxDue-len(u.due))]...)
}

// forget begins an interval early, so that the next use of every blob renews it.
func (u *uses) forget() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.restart()
}

// idle reports whether there is nothing to renew or to check.
func (u *uses) idle() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.due)+len(u.sample) == 0
}

// renewUsed renews locally used blobs and results in the upstream until the Overlay is closed. A failed round is
// repeated last and the next one is smaller, since it may have failed because of a single entry.
func (o *Overlay) renewUsed() {
	pause, size := renewPause, renewBatch
	for {
		if o.uses.idle() {
			select {
			case <-o.uses.added:
			case <-o.ctx.Done():
				return
			}
		}
		select {
		case <-time.After(pause):
		case <-o.ctx.Done():
			return
		}
		pause = renewPause
		due, sample := o.uses.take(size)
		failed, _, err := o.renew(due)
		if err != nil {
			if o.ctx.Err() == nil {
				o.warn("cannot renew leases in the upstream yet", "err", err)
			}
			o.uses.retry(due)
			pause, size = renewFailure, max(len(due)/2, 1)
			continue
		}
		if failed > 0 && failed == len(due) {
			pause = renewFailure // their next use, which may follow at once, retries them
		}
		size = min(2*size, renewBatch)
		o.count(func(st *Stats) { st.Renewed += int64(len(due) - failed) })
		if _, restored, err := o.renew(sample); err == nil && restored > 0 {
			o.uses.forget()
		}
	}
}

// renew renews entries in the upstream. It sends local blobs that are absent there, and returns their number. It does
// not send absent results, because somebody may have removed them. It also returns the number of blobs that it could
// not send and of results whose lookup failed. Only their next use retries them, since some may always fail. A refused
// lookup does not count as failed: the upstream would refuse every result at every use.
func (o *Overlay) renew(entries []entry) (failed, restored int, err error) {
	for instance, ds := range blobsByInstance(entries) {
		s, err := o.store(instance)
		if err != nil {
			return 0, restored, err
		}
		f, n, err := s.renewBlobs(o.ctx, ds)
		failed += f
		if restored += n; err != nil {
			return 0, restored, err
		}
	}
	for _, e := range entries {
		if e.kind != result {
			continue
		}
		s, err := o.store(e.instance)
		if err == nil {
			err = s.renewResult(o.ctx, e.digest)
		}
		switch {
		case o.ctx.Err() != nil || o.unusable(e.instance, err):
			return failed, restored, err
		case err == nil, errors.Is(err, cas.ErrNotFound), errors.Is(err, os.ErrPermission),
			errors.Is(err, errors.ErrUnsupported):
		default:
			o.warn("cannot renew results in the upstream yet", "err", err)
			o.uses.unsee(e)
			failed++
		}
	}
	return failed, restored, nil
}

// renewBlobs is renew for the blobs of one instance, except pending ones.
func (s *store) renewBlobs(ctx context.Context, ds []cas.Digest) (failed, restored int, err error) {
	// The local store may have got blobs of other functions before it had an upstream.
	ds = slices.DeleteFunc(s.o.unlisted(s.name, ds), func(d cas.Digest) bool { return s.checkFunction(d) != nil })
	if len(ds) == 0 {
		return 0, 0, nil
	}
	renew := s.upstream.Store.Missing
	if r, ok := cas.As[cas.Renewer](s.upstream.Store); ok {
		renew = r.Renew
	}
	absent, err := renew(ctx, ds)
	if err != nil || len(absent) == 0 {
		return 0, 0, err
	}
	gone, err := s.local.Store.Missing(ctx, absent)
	if err != nil {
		return 0, 0, err
	}
	if s.absenter() != nil { // queries have reported them present
		s.notRenewed(gone)
	}
	lost := without(absent, setOf(gone))
	if len(lost) == 0 {
		return 0, 0, nil
	}
	errs := s.send(ctx, lost, unpaced)
	refused := map[cas.Digest]bool{} // not lost: the upstream never had them
	maps.DeleteFunc(errs, func(d cas.Digest, failure error) bool {
		refused[d] = tooLarge(failure) || errors.Is(failure, cas.ErrInvalid)
		return refused[d]
	})
	lost = without(lost, refused)
	if len(lost) == 0 {
		return 0, 0, nil
	}
	for _, failure := range errs {
		if errors.Is(failure, cas.ErrUnavailable) {
			err = failure
		}
	}
	if err == nil { // otherwise all are retried
		for d := range errs {
			s.o.uses.unsee(entry{blob, s.name, d})
		}
	}
	failed, restored = len(errs), len(lost)-len(errs)
	s.o.count(func(st *Stats) { st.Restored += int64(restored) })
	s.o.warn("the upstream has lost blobs, or cannot renew them; sent them again from the local store",
		"blobs", restored, "failed", failed, "instance", s.name, "first", lost[0].String())
	return failed, restored, err
}

// renewResult renews the result of an action.
func (s *store) renewResult(ctx context.Context, action cas.Digest) error {
	if r, ok := cas.As[resultRenewer](s.upstream.Store); ok {
		return r.RenewResult(ctx, action)
	}
	_, err := s.upstream.Actions.Lookup(ctx, action)
	return err
}

// unlisted returns the blobs of ds that are not pending.
func (o *Overlay) unlisted(instance string, ds []cas.Digest) []cas.Digest {
	if o.pending == nil {
		return ds
	}
	return without(ds, o.pending.has(instance, ds))
}
