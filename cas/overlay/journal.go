// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// The kinds of entries, as words of the journal.
const (
	blob   = "blob"
	result = "result"
)

// An entry is a blob or the result of an action that is still to be sent.
type entry struct {
	kind     string
	instance string
	digest   cas.Digest
}

// String returns what stands in the journal behind the verb.
func (e entry) String() string { return fmt.Sprintf("%s %q %s", e.kind, e.instance, e.digest) }

// The verbs of the journal.
const (
	added  = "add"
	struck = "done"
)

// pending is what is still to be sent, oldest first. It is as a file of lines, each a verb and an entry: what
// was added and not struck out. A line is complete before its entry is acknowledged, and one without an end
// is of an entry that was not.
type pending struct {
	path string

	mu      sync.Mutex
	changed *sync.Cond // when entries are added or struck out, and when someone is to look at his context
	file    *os.File
	size    int64                   // of the file, in bytes
	lines   int                     // of the file
	queue   []entry                 // oldest first, each once
	at      map[entry]uint64        // those of queue: when they were added last, counted
	clock   uint64                  // how often something was added
	taken   int                     // how many of queue are being sent,
	by      uint64                  // and what clock was when they were taken
	resting []resting               // entries that are not in queue: their time has not come
	rests   map[entry]time.Duration // how long an entry has rested last
}

// resting is an entry that is not sent before a time.
type resting struct {
	entry
	until time.Time
}

// saved is what the name of a journal that was damaged has at its end.
const saved = ".damaged"

// openPending reads the journal at path, and makes it if there is none. The loss of power leaves blocks of zeros and
// torn lines: damaged is how many lines could not be read, and what they were in is kept beside the journal.
func openPending(path string) (p *pending, damaged int, err error) {
	p = &pending{path: path, at: map[entry]uint64{}, rests: map[entry]time.Duration{}}
	p.changed = sync.NewCond(&p.mu)
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return nil, 0, err
	}
	for line := range strings.Lines(string(data)) {
		text, whole := strings.CutSuffix(line, "\n")
		verb, e, ok := parse(strings.TrimLeft(text, "\x00"))
		switch {
		case !whole:
		case !ok:
			damaged++
		case verb == added:
			p.push(e)
		default:
			delete(p.at, e)
		}
	}
	if damaged > 0 {
		if err := os.WriteFile(path+saved, data, 0o600); err != nil {
			return nil, 0, err
		}
	}
	seen := map[entry]bool{} // what was struck out and added again is in the queue twice
	p.queue = slices.DeleteFunc(p.queue, func(e entry) bool {
		drop := p.at[e] == 0 || seen[e]
		seen[e] = true
		return drop
	})
	return p, damaged, p.rewrite()
}

// parse reads a line without its end.
func parse(line string) (verb string, e entry, ok bool) {
	var digest string
	_, err := fmt.Sscanf(line, "%s %s %q %s", &verb, &e.kind, &e.instance, &digest)
	if err == nil {
		e.digest, err = cas.ParseDigest(digest)
	}
	return verb, e, err == nil && (verb == added || verb == struck) && (e.kind == blob || e.kind == result)
}

// push notes an entry. The caller holds p.mu, or is alone.
func (p *pending) push(e entry) {
	p.clock++
	if p.at[e] == 0 {
		p.queue = append(p.queue, e)
	}
	p.at[e] = p.clock
}

// add makes entries pending. When it returns nil they are, even if the process is killed.
func (p *pending) add(entries ...entry) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines bytes.Buffer
	n := 0
	for _, e := range entries {
		if p.at[e] == 0 {
			n++
			fmt.Fprintf(&lines, "%s %s\n", added, e)
		}
	}
	if err := p.append(lines.Bytes(), n); err != nil {
		return err
	}
	for _, e := range entries {
		p.push(e)
	}
	p.changed.Broadcast()
	return nil
}

// strike ends what first has returned: done is over, again comes behind all else, and rest does so after a while.
// What was added again since it was taken is not over: a result may be another by now.
func (p *pending) strike(done, again, rest []entry) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = p.queue[p.taken:]
	p.taken = 0
	var lines bytes.Buffer
	n := 0
	for _, e := range done {
		if p.at[e] > p.by {
			again = append(again, e)
			continue
		}
		n++
		fmt.Fprintf(&lines, "%s %s\n", struck, e)
		delete(p.at, e)
		delete(p.rests, e)
	}
	p.queue = append(p.queue, again...)
	for _, e := range rest {
		p.rests[e] = min(max(2*p.rests[e], minPause), maxRest)
		p.resting = append(p.resting, resting{e, time.Now().Add(p.rests[e])})
	}
	p.changed.Broadcast()
	// A journal of mostly what is over is made anew.
	if p.lines > 4*len(p.at)+10_000 {
		return p.rewrite()
	}
	return p.append(lines.Bytes(), n)
}

// first returns up to n entries, oldest first, when there are some, or nil when ctx has ended. The caller, of
// whom there is one, ends with strike.
func (p *pending) first(ctx context.Context, n int) []entry {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		next := p.rouse()
		if ctx.Err() != nil {
			return nil
		}
		if len(p.queue) > 0 {
			break
		}
		timer := time.AfterFunc(next, p.wake)
		p.changed.Wait()
		timer.Stop()
	}
	p.taken, p.by = min(n, len(p.queue)), p.clock
	return slices.Clone(p.queue[:p.taken])
}

// rouse puts into the queue what has rested, and returns how long nothing else will have. The caller holds p.mu.
func (p *pending) rouse() time.Duration {
	next := maxRest
	p.resting = slices.DeleteFunc(p.resting, func(r resting) bool {
		left := time.Until(r.until)
		if left <= 0 {
			p.queue = append(p.queue, r.entry)
			return true
		}
		next = min(next, left)
		return false
	})
	return next
}

// wake lets those who wait look at their contexts.
func (p *pending) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Broadcast()
}

// all returns every entry.
func (p *pending) all() []entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entries()
}

// entries is all. The caller holds p.mu, or is alone.
func (p *pending) entries() []entry {
	all := slices.Clone(p.queue)
	for _, r := range p.resting {
		all = append(all, r.entry)
	}
	return all
}

func (p *pending) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.at)
}

// append writes whole lines, or none of them. The caller holds p.mu.
func (p *pending) append(lines []byte, n int) error {
	if len(lines) == 0 {
		return nil
	}
	if _, err := p.file.WriteAt(lines, p.size); err != nil {
		return errors.Join(fmt.Errorf("journal: %w", err), p.file.Truncate(p.size))
	}
	p.size += int64(len(lines))
	p.lines += n
	return nil
}

// rewrite makes the journal anew from what is pending. The caller holds p.mu, or is alone.
func (p *pending) rewrite() error {
	var lines bytes.Buffer
	all := p.entries()
	for _, e := range all {
		fmt.Fprintf(&lines, "%s %s\n", added, e)
	}
	f, err := os.OpenFile(p.path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(lines.Bytes()); err == nil {
		err = os.Rename(f.Name(), p.path)
	}
	if err != nil {
		f.Close()
		return err
	}
	if p.file != nil {
		p.file.Close()
	}
	p.file, p.size, p.lines = f, int64(lines.Len()), len(all)
	return nil
}

// drained waits until nothing is pending or ctx ends.
func (p *pending) drained(ctx context.Context) {
	stop := context.AfterFunc(ctx, p.wake)
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.at) > 0 && ctx.Err() == nil {
		p.changed.Wait()
	}
}

// close closes the file.
func (p *pending) close() error { return p.file.Close() }
