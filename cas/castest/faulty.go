// SPDX-License-Identifier: Apache-2.0

package castest

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

// An Op is an operation of a Faulty.
type Op string

// The operations of a Faulty, by the names of their methods.
const (
	Open    Op = "Open"
	Put     Op = "Put"
	PutAll  Op = "PutAll"
	Missing Op = "Missing"
	Lookup  Op = "Lookup"
	Record  Op = "Record"
)

// A Faulty is a cas.Store, a cas.Batcher and a cas.ActionCache over others, whose faults a test decides: calls
// that fail, calls that wait, blobs that are lost, readers that end early or bring other bytes. Without a fault
// it keeps their contracts. It is safe for concurrent use; make it with NewFaulty.
type Faulty struct {
	store   cas.Store
	actions cas.ActionCache

	mu     sync.Mutex
	calls  map[Op]int
	fails  map[Op]failure
	gates  map[Op]*Gate
	blobs  map[cas.Digest]bool // put here; true: lost since
	damage func(d cas.Digest, r io.Reader) io.Reader
}

// A failure is an error for calls from one on.
type failure struct {
	from, to int
	err      error
}

// NewFaulty returns a Faulty without faults over a store and an action cache; the latter may be nil if it is
// not used.
func NewFaulty(store cas.Store, actions cas.ActionCache) *Faulty {
	return &Faulty{store: store, actions: actions,
		calls: map[Op]int{}, fails: map[Op]failure{}, gates: map[Op]*Gate{}, blobs: map[cas.Digest]bool{}}
}

// Calls returns how many calls of op have begun.
func (f *Faulty) Calls(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

// FailNth makes the nth call of op from now on, counted from 1, fail with err, and no other.
func (f *Faulty) FailNth(op Op, nth int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails[op] = failure{f.calls[op] + nth, f.calls[op] + nth, err}
}

// Fail makes every call of each of ops fail with err, from now on.
func (f *Faulty) Fail(err error, ops ...Op) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, op := range ops {
		f.fails[op] = failure{0, 1 << 62, err}
	}
}

// Heal ends every fault but the loss of blobs and the gates.
func (f *Faulty) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.fails)
	f.damage = nil
}

// A Gate is where calls of one operation wait.
type Gate struct {
	arrived chan struct{}
	open    chan struct{}
	once    sync.Once
}

// Hold makes every call of op wait, before it does anything, until the Gate is opened or its context ends.
func (f *Faulty) Hold(op Op) *Gate {
	f.mu.Lock()
	defer f.mu.Unlock()
	g := &Gate{arrived: make(chan struct{}, 1000), open: make(chan struct{})}
	f.gates[op] = g
	return g
}

// Arrived waits until one more call has come to the gate, up to 1000 in all.
func (g *Gate) Arrived() { <-g.arrived }

// Open lets through all that wait and all that come. It may be called again.
func (g *Gate) Open() { g.once.Do(func() { close(g.open) }) }

// Lose loses a share, from 0 to 1, of the blobs that were put here, and returns them. Equal seeds lose the same
// of the same. A lost blob is absent until it is put again.
func (f *Faulty) Lose(seed uint64, share float64) []cas.Digest {
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
	kept = kept[:int(share*float64(len(kept))+0.5)]
	for _, d := range kept {
		f.blobs[d] = true
	}
	return kept
}

// errCut is how a reader ends that Cut has shortened.
var errCut = errors.New("connection reset")

// Cut makes every reader that is opened from now on fail after n bytes, unless it ends before.
func (f *Faulty) Cut(n int64) {
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

// Flip makes every reader that is opened from now on bring a first byte with one bit changed. The readers
// notice it as those of a store do: with cas.ErrCorrupt at their ends.
func (f *Faulty) Flip() {
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

// begin counts a call, waits at its gate and returns the error that it is to fail with.
func (f *Faulty) begin(ctx context.Context, op Op) error {
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

func (f *Faulty) lost(d cas.Digest) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.blobs[d]
}

// kept notes that d was put.
func (f *Faulty) kept(d cas.Digest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !d.IsEmpty() {
		f.blobs[d] = false
	}
}

// Open implements cas.Store.
func (f *Faulty) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
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
func (f *Faulty) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := f.begin(ctx, Put); err != nil {
		return err
	}
	if f.lost(d) {
		// The store below has the blob still, and need not look at what it is offered.
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
	f.kept(d)
	return nil
}

// PutAll implements cas.Batcher, by Put of the store if that is none.
func (f *Faulty) PutAll(ctx context.Context, blobs []cas.Blob) []error {
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
			f.kept(b.Digest)
		}
	}
	return errs
}

// Missing implements cas.Store.
func (f *Faulty) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
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
func (f *Faulty) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if err := f.begin(ctx, Lookup); err != nil {
		return nil, err
	}
	return f.actions.Lookup(ctx, action)
}

// Record implements cas.ActionCache.
func (f *Faulty) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := f.begin(ctx, Record); err != nil {
		return err
	}
	return f.actions.Record(ctx, action, r)
}
