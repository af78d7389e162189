// SPDX-License-Identifier: Apache-2.0

package persistent

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Member is what a Pool keeps. Close ends it and returns when it is gone.
type Member interface {
	Alive() bool
	Close()
}

// A Pool keeps idle members. It closes the least recently used ones if there are more than MaxIdle, or while memory is
// low, and those that have been idle for MaxAge. The methods are safe for concurrent use.
type Pool[M Member] struct {
	MaxIdle int
	MaxAge  time.Duration
	// LowMemory reports whether members should be closed because the machine runs out of memory.
	LowMemory func() bool

	mu    sync.Mutex
	idle  []idle[M] // the least recently used first
	timer *time.Timer
}

type idle[M Member] struct {
	key    string
	member M
	since  time.Time
}

// maxIdle bounds the idle members of any machine: each holds one of the sandbox's 303 slots, which runs need as well.
const maxIdle = 40

// NewPool returns a pool for this machine: two idle members for each processor, but not more than maxIdle, for ten
// minutes each, while a tenth of the memory is available.
func NewPool[M Member]() *Pool[M] {
	return &Pool[M]{MaxIdle: min(2*runtime.NumCPU(), maxIdle), MaxAge: 10 * time.Minute, LowMemory: lowMemory}
}

// Take removes the most recently used member of a key that is alive and returns it, or false if there is none.
func (p *Pool[M]) Take(key string) (m M, ok bool) {
	p.mu.Lock()
	var dead []M
	for i, e := range slices.Backward(p.idle) {
		if e.key != key {
			continue
		}
		p.idle = slices.Delete(p.idle, i, i+1)
		if ok = e.member.Alive(); ok {
			m = e.member
			break
		}
		dead = append(dead, e.member)
	}
	p.mu.Unlock()
	for _, m := range dead {
		m.Close()
	}
	return m, ok
}

// Put adds an idle member.
func (p *Pool[M]) Put(key string, m M) {
	p.mu.Lock()
	p.idle = append(p.idle, idle[M]{key, m, time.Now()})
	p.mu.Unlock()
	p.sweep()
}

// sweepInterval is the interval at which a pool looks for members to close, unless it is empty.
const sweepInterval = 10 * time.Second

// sweep closes the members that the pool must not keep, and schedules the next sweep if others remain.
func (p *Pool[M]) sweep() {
	low := p.LowMemory()
	p.mu.Lock()
	n := max(0, len(p.idle)-p.MaxIdle)
	for n < len(p.idle) && (time.Since(p.idle[n].since) >= p.MaxAge || !p.idle[n].member.Alive()) {
		n++
	}
	if low && n == 0 && len(p.idle) > 0 {
		n = 1 // then look again
	}
	closing := slices.Clone(p.idle[:n])
	p.idle = slices.Delete(p.idle, 0, n)
	if p.timer != nil {
		p.timer.Stop()
	}
	if len(p.idle) > 0 {
		p.timer = time.AfterFunc(min(sweepInterval, p.MaxAge), p.sweep)
	}
	p.mu.Unlock()
	for _, e := range closing {
		e.member.Close()
	}
	if low && len(closing) > 0 {
		p.sweep()
	}
}

// lowMemory reports whether less than a tenth of this machine's memory is available (proc_meminfo(5)).
func lowMemory() bool {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return false
	}
	kilobytes := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 {
			kilobytes[f[0]], _ = strconv.ParseInt(f[1], 10, 64)
		}
	}
	return kilobytes["MemAvailable:"] < kilobytes["MemTotal:"]/10
}
