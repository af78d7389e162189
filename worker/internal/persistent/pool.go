// SPDX-License-Identifier: Apache-2.0

package persistent

import (
	"os"
	"path"
	"path/filepath"
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
	// Root is the directory with proc and sys, which report the available memory.
	Root string

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
	return &Pool[M]{MaxIdle: min(2*runtime.NumCPU(), maxIdle), MaxAge: 10 * time.Minute, Root: "/"}
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
	low := lowMemory(p.Root)
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

// lowMemory reports whether less than a tenth of the memory is available, either of this machine (proc_meminfo(5)) or
// within the limit of a control group that contains this process, such as a container's.
func lowMemory(root string) bool {
	machine := counters(filepath.Join(root, "proc/meminfo"))
	if machine["MemAvailable:"] < machine["MemTotal:"]/10 {
		return true
	}
	groups, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup")) // a kernel without control groups has no such file
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // a number, controllers, the path
		if len(f) < 3 {
			continue
		}
		k := groupFiles{"", "memory.max", "memory.current", ""}
		if slices.Contains(strings.Split(f[1], ","), "memory") {
			k = groupFiles{"memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}
		} else if f[1] != "" {
			continue
		}
		for dir, last := f[2], ""; dir != last; dir, last = path.Dir(dir), dir { // the limits of all parents apply
			if k.low(filepath.Join(root, "sys/fs/cgroup", k.mount, dir)) {
				return true
			}
		}
	}
	return false
}

// groupFiles names the files about a control group's memory, below the mount of its hierarchy. Counters of memory.stat
// with the prefix include the groups inside.
type groupFiles struct{ mount, limit, used, prefix string }

// low reports whether less than a tenth of a group's limit is available. It returns false for a group that has no limit
// or is not visible.
func (k *groupFiles) low(dir string) bool {
	limit, err := number(filepath.Join(dir, k.limit))
	if err != nil {
		return false
	}
	used, err := number(filepath.Join(dir, k.used))
	if err != nil || limit-used >= limit/10 {
		return false
	}
	stat := counters(filepath.Join(dir, "memory.stat")) // the kernel can reclaim the page cache
	return limit-used+stat[k.prefix+"active_file"]+stat[k.prefix+"inactive_file"] < limit/10
}

// number returns the only number in a file.
func number(file string) (int64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}

// counters returns the numbers in a file whose lines begin with a name and a number, by name.
func counters(file string) map[string]int64 {
	text, _ := os.ReadFile(file)
	all := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 {
			all[f[0]], _ = strconv.ParseInt(f[1], 10, 64)
		}
	}
	return all
}
