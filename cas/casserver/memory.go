// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas/quota"
	"golang.org/x/sync/semaphore"
)

const (
	// maxCompressMemory limits the memory of all calls that compress or decompress; further ones wait.
	maxCompressMemory = 1 << 30
	// maxCallerMemory limits the memory of one caller to 256 reads, or as many uploads at Zstandard's usual levels.
	maxCallerMemory = maxCompressMemory / 2
	// yieldFraction is the fraction of Config.StreamIdle for which a client may be silent while others wait for its
	// memory. Ten seconds outlast the pauses of a garbage collector or of a network that changes, and a message of
	// 128 KiB on a link that hundreds of downloads share: Bazel gives up after five errors within seconds.
	yieldFraction = 6
)

// A memoryPool allots memory to compressors, in order of request and within a limit per caller. The window of an idle
// stream cannot be released, so streams with silent clients end while other calls wait.
type memoryPool struct {
	total      *semaphore.Weighted
	yieldAfter time.Duration // how long a client may be silent while others wait for its memory

	mu         sync.Mutex
	waiting    int               // requests that wait for total
	shares     map[string]*share // by caller
	holders    map[*watched]*share
	reclaiming bool // reclaim runs
}

// A share is the memory of one caller.
type share struct {
	*semaphore.Weighted
	requests int // that wait for memory or hold some
	waiting  int // those that wait for the share
}

func newMemoryPool(streamIdle time.Duration) *memoryPool {
	return &memoryPool{
		total: semaphore.NewWeighted(maxCompressMemory), yieldAfter: max(streamIdle/yieldFraction, time.Millisecond),
		shares: map[string]*share{}, holders: map[*watched]*share{},
	}
}

// acquire reserves n bytes for a call until release is called, and waits for them if necessary. w is the stream of the
// call, or nil if the call never waits for its client.
func (p *memoryPool) acquire(ctx context.Context, n int64, w *watched) (release func(), err error) {
	caller := quota.Caller(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.shares[caller]
	if s == nil {
		s = &share{Weighted: semaphore.NewWeighted(maxCallerMemory)}
		p.shares[caller] = s
	}
	s.requests++
	leave := func() {
		if s.requests--; s.requests == 0 {
			delete(p.shares, caller)
		}
	}
	if err := p.await(ctx, s.Weighted, n, &s.waiting); err != nil {
		leave()
		return nil, err
	}
	if err := p.await(ctx, p.total, n, &p.waiting); err != nil {
		s.Release(n)
		leave()
		return nil, err
	}
	if w != nil {
		p.holders[w] = s
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.total.Release(n)
		s.Release(n)
		delete(p.holders, w)
		leave()
	}, nil
}

// await acquires n bytes of sem and counts the request in waiting meanwhile. The caller holds p.mu.
func (p *memoryPool) await(ctx context.Context, sem *semaphore.Weighted, n int64, waiting *int) error {
	if sem.TryAcquire(n) {
		return nil
	}
	*waiting++
	if !p.reclaiming {
		p.reclaiming = true
		go p.reclaim()
	}
	p.mu.Unlock()
	err := sem.Acquire(ctx, n)
	p.mu.Lock()
	*waiting--
	return err
}

// reclaim ends streams with silent clients while requests wait for their memory.
func (p *memoryPool) reclaim() {
	tick := time.NewTicker(p.yieldAfter / 10)
	defer tick.Stop()
	for range tick.C {
		if !p.endSilent() {
			return
		}
	}
}

// endSilent ends streams with silent clients if requests wait for their memory. It reports whether any request waits.
func (p *memoryPool) endSilent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for w, s := range p.holders {
		if p.waiting+s.waiting > 0 && w.silence() >= p.yieldAfter {
			w.stop(quota.Exhausted(fmt.Sprintf("other calls need the memory of this stream, and its client was silent for %v; "+
				"retry, or transfer the blob uncompressed", p.yieldAfter)))
		}
	}
	p.reclaiming = p.waiting > 0
	for _, s := range p.shares {
		p.reclaiming = p.reclaiming || s.waiting > 0
	}
	return p.reclaiming
}
