// SPDX-License-Identifier: Apache-2.0

// Package faulty decorates a store and an action cache with faults that a test chooses. Only tests import it.
package faulty

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// An Op is an operation of a Store.
type Op string

// The operations of a Store, named after its methods.
const (
	Open    Op = "Open"
	Put     Op = "Put"
	PutAll  Op = "PutAll"
	Missing Op = "Missing"
	Lookup  Op = "Lookup"
	Record  Op = "Record"
)

// A Store decorates a store and an action cache with faults that a test chooses: calls that fail or block, lost blobs,
// readers that end early or return wrong data. Without faults it keeps the contracts of cas.Store, cas.Batcher and
// cas.ActionCache. It is safe for concurrent use. Create one with New.
type Store struct {
	store   cas.Store
	actions cas.ActionCache

	mu     sync.Mutex
	calls  map[Op]int
	fails  map[Op]failure
	gates  map[Op]*Gate
	blobs  map[cas.Digest]bool // blobs put through the Store; true if lost
	damage func(d cas.Digest, r io.Reader) io.Reader
}

// A failure is an error for a range of calls.
type failure struct {
	from, to int
	err      error
}

// New returns a Store without faults. Actions may be nil if they are not used.
func New(store cas.Store, actions cas.ActionCache) *Store {
	return &Store{
		store: store, actions: actions,
		calls: map[Op]int{}, fails: map[Op]failure{}, gates: map[Op]*Gate{}, blobs: map[cas.Digest]bool{},
	}
}

// Calls returns the number of calls of op so far.
func (f *Store) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// FailNth makes only the nth call of op from now on, counted from 1, fail with err.
func (f *Store) FailNth(op Op, nth int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails[op] = failure{f.calls[op] + nth, f.calls[op] + nth, err}
}

// Fail makes all calls of ops fail with err from now on.
func (f *Store) Fail(err error, ops ...Op) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, op := range ops {
		f.fails[op] = failure{0, 1 << 62, err}
	}
}

// Heal ends all faults except lost blobs and gates.
func (f *Store) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.fails)
	f.damage = nil
}

// A Gate blocks the calls of an operation.
type Gate struct {
	arrived chan struct{}
	open    chan struct{}
	once    sync.Once
}

// Hold makes every call of op block at its start, until the Gate is opened or the context of the call ends.
func (f *Store) Hold(op Op) *Gate {
	f.mu.Lock()
	defer f.mu.Unlock()
	g := &Gate{arrived: make(chan struct{}, 1000), open: make(chan struct{})}
	f.gates[op] = g
	return g
}

// Arrived waits until another call blocks at the gate, up to 1000 in total.
func (g *Gate) Arrived() { <-g.arrived }

// Open unblocks the waiting and all later calls. It may be called repeatedly.
func (g *Gate) Open() { g.once.Do(func() { close(g.open) }) }

// Lose makes a fraction, from 0 to 1, of the blobs put through f absent until they are put again, and returns them. The
// choice depends only on seed.
func (f *Store) Lose(seed uint64, fraction float64) []cas.Digest {
	f.mu.Lock()
	defer f.mu.Unlock()
	var kept []cas.Digest
	for d, lost := range f.blobs {
		if !lost {
			kept = append(kept, d)
		}
	}
	slices.SortFunc(kept, func(a, b cas.Digest) int { return strings.Compare(a.String(), b.String()) })
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(kept), func(i, j int) { kept[i], kept[j] = kept[j], kept[i] })
	kept = kept[:int(fraction*float64(len(kept))+0.5)]
	for _, d := range kept {
		f.blobs[d] = true
	}
	return kept
}

// errCut is the error of readers shortened by Cut.
var errCut = errors.New("connection reset")

// Cut makes every reader opened from now on fail after n bytes.
func (f *Store) Cut(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.damage = func(_ cas.Digest, r io.Reader) io.Reader {
		return io.MultiReader(io.LimitReader(r, n), readerFunc(func([]byte) (int, error) {
			if _, err := r.Read(make([]byte, 1)); err == io.EOF {
				return 0, io.EOF
			}
			return 0, errCut
		}))
	}
}

// Flip makes every reader opened from now on flip a bit of the first byte. Like those of a store, the readers fail with
// cas.ErrCorrupt at the end.
func (f *Store) Flip() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.damage = func(d cas.Digest, r io.Reader) io.Reader {
		first := true
		return cas.Verify(d, readerFunc(func(p []byte) (int, error) {
			n, err := r.Read(p)
			if first && n > 0 {
				p[0] ^= 1
				first = false
			}
			return n, err
		}))
	}
}

// begin counts a call, waits at its gate and returns the error of its fault.
func (f *Store) begin(ctx context.Context, op Op) error {
	f.mu.Lock()
	f.calls[op]++
	n, fail, gate := f.calls[op], f.fails[op], f.gates[op]
	f.mu.Unlock()
	if gate != nil {
		gate.arrived <- struct{}{}
		select {
		case <-gate.open:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if fail.err != nil && fail.from <= n && n <= fail.to {
		return fmt.Errorf("%s: %w", op, fail.err)
	}
	return nil
}

func (f *Store) lost(d cas.Digest) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.blobs[d]
}

// recordPut remembers that d was put.
func (f *Store) recordPut(d cas.Digest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !d.IsEmpty() {
		f.blobs[d] = false
	}
}

// Open implements cas.Store.
func (f *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := f.begin(ctx, Open); err != nil {
		return nil, err
	}
	if f.lost(d) {
		return nil, fmt.Errorf("blob %s: %w", d, cas.ErrNotFound)
	}
	r, err := f.store.Open(ctx, d, off)
	f.mu.Lock()
	damage := f.damage
	f.mu.Unlock()
	if err != nil || damage == nil || off > 0 {
		return r, err
	}
	return struct {
		io.Reader
		io.Closer
	}{damage(d, r), r}, nil
}

// Put implements cas.Store.
func (f *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := f.begin(ctx, Put); err != nil {
		return err
	}
	if f.lost(d) {
		// The store still has the blob and need not verify the data.
		b, err := io.ReadAll(io.LimitReader(r, d.Size()+1))
		if err != nil {
			return err
		}
		if got := d.Function().Sum(b); got != d {
			return cas.Mismatch(d, got)
		}
		r = bytes.NewReader(b)
	}
	if err := f.store.Put(ctx, d, r); err != nil {
		return err
	}
	f.recordPut(d)
	return nil
}

// PutAll implements cas.Batcher.
func (f *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	if err := f.begin(ctx, PutAll); err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	copy(errs, cas.PutAll(ctx, f.store, blobs))
	for i, b := range blobs {
		if errs[i] == nil {
			f.recordPut(b.Digest)
		}
	}
	return errs
}

// Missing implements cas.Store.
func (f *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := f.begin(ctx, Missing); err != nil {
		return nil, err
	}
	absent, err := f.store.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	gone := make(map[cas.Digest]bool, len(absent))
	for _, d := range absent {
		gone[d] = true
	}
	var missing []cas.Digest
	seen := map[cas.Digest]bool{}
	for _, d := range ds {
		if (gone[d] || f.lost(d)) && !seen[d] {
			missing = append(missing, d)
		}
		seen[d] = true
	}
	return missing, nil
}

// Lookup implements cas.ActionCache.
func (f *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if err := f.begin(ctx, Lookup); err != nil {
		return nil, err
	}
	return f.actions.Lookup(ctx, action)
}

// Record implements cas.ActionCache.
func (f *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := f.begin(ctx, Record); err != nil {
		return err
	}
	return f.actions.Record(ctx, action, r)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
