// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas"
)

// inFlight limits the concurrent calls of one Fetch or PutAll; with their blobs they take up to 24 MiB.
const inFlight = 8

// Fetch copies the blobs ds that another store lacks into it, with many small ones per call. It returns those that are
// absent here, too, in order and each once. After an error it may have copied some.
func (s *Store) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error) {
	wanted, err := to.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	if absent, err = s.Missing(ctx, wanted); err != nil {
		return nil, err
	}
	isAbsent := make(map[cas.Digest]bool, len(absent))
	for _, d := range absent {
		isAbsent[d] = true
	}
	wanted = slices.DeleteFunc(wanted, func(d cas.Digest) bool { return isAbsent[d] })

	t, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	parallel(batches(t, wanted, func(d cas.Digest) cas.Digest { return d }), func(batch []cas.Digest) {
		if ctx.Err() != nil {
			return
		}
		if err := s.fetchBatch(ctx, t, to, batch); err != nil {
			cancel(err)
		}
	})
	return absent, context.Cause(ctx)
}

// fetchBatch copies one of the batches.
func (s *Store) fetchBatch(ctx context.Context, t *capabilities, to cas.Store, batch []cas.Digest) error {
	if len(batch) == 1 {
		r, err := s.Open(ctx, batch[0], 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return to.Put(ctx, batch[0], r)
	}
	all, err := s.readBatch(ctx, t, batch)
	if err != nil {
		return err
	}
	var blobs []cas.Blob
	for i, b := range all {
		switch {
		case b.err == nil:
			blobs = append(blobs, cas.Blob{Digest: batch[i], Data: b.data})
		case errors.Is(b.err, errNotBatched):
			err = s.fetchBatch(ctx, t, to, batch[i:i+1])
		default:
			err = b.err
		}
		if err != nil {
			return err
		}
	}
	for _, err := range cas.PutAll(ctx, to, blobs) {
		if err != nil {
			return err
		}
	}
	return nil
}

// parallel calls f with each batch, inFlight at a time, and waits for all calls.
func parallel[T any](batches []T, f func(T)) {
	var group sync.WaitGroup
	semaphore := make(chan struct{}, inFlight)
	for _, b := range batches {
		semaphore <- struct{}{}
		group.Go(func() {
			defer func() { <-semaphore }()
			f(b)
		})
	}
	group.Wait()
}

// byFunction splits ds into runs of at most size digests with the same digest function.
func byFunction(ds []cas.Digest, size int) [][]cas.Digest {
	var runs [][]cas.Digest
	for i, d := range ds {
		last := len(runs) - 1
		if i == 0 || len(runs[last]) == size || runs[last][0].Function() != d.Function() {
			runs, last = append(runs, ds[i:i]), last+1
		}
		runs[last] = ds[i-len(runs[last]) : i+1]
	}
	return runs
}

// batches splits all into batches that fit into one call, by the sizes of the blobs. All blobs of a batch have the same
// digest function, and a large blob has its own batch.
func batches[T any](t *capabilities, all []T, digest func(T) cas.Digest) [][]T {
	var batches [][]T
	var batch []T
	var bytes int64
	for _, b := range all {
		n := digest(b).Size()
		if n > t.maxSmall {
			batches = append(batches, []T{b})
			continue
		}
		full := bytes+n > t.maxBatch || len(batch) == maxEntries
		if len(batch) > 0 && (full || digest(batch[0]).Function() != digest(b).Function()) {
			batches = append(batches, batch)
			batch, bytes = nil, 0
		}
		batch = append(batch, b)
		bytes += n
	}
	if len(batch) > 0 {
		batches = append(batches, batch)
	}
	return batches
}
