// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
)

// maxUnsent is the maximum number of unsent blobs.
const maxUnsent = 1 << 16

// unsentSuffix ends the name of the file, next to Config.Journal, that lists unsent blobs.
const unsentSuffix = ".unsent"

// unsent are the large blobs that the local store may have although the upstream does not: WriteThrough stores them
// locally first. A blob is recorded before its local copy becomes visible, and struck out when the upstream has it. A
// blob that is present already needs no record when it is put again. A blob that an earlier WriteBack left, and that is
// too large for the upstream, is recorded when it is given up. The records survive the end of the process, and with
// Config.Sync a power failure.
type unsent struct {
	limit int            // of marks
	work  sync.WaitGroup // has the running compaction

	mu         sync.Mutex
	log        *durable.Log  // guarded by mu
	records    int           // guarded by mu; in log
	marks      map[key]*mark // guarded by mu
	compacting bool          // guarded by mu
	closed     bool          // guarded by mu
}

// A mark is the state of one blob that is unsent or is being put.
type mark struct {
	puts     int  // running calls of Put
	kept     bool // the local store has a copy
	sent     bool // the blob is not unsent: the upstream has it, or it was present before it was put again
	recorded bool // log has it
}

// openUnsent reads the file at path. If synced, records survive a power failure.
func openUnsent(path string, synced bool) (*unsent, error) {
	u := &unsent{limit: maxUnsent, marks: map[key]*mark{}}
	var err error
	u.log, err = durable.Open(durable.Config{Path: path, Sync: synced, Replay: func(record []byte) error {
		verb, e, _, err := parseRecord(record)
		switch {
		case err != nil:
			return err
		case verb == added:
			u.marks[key{e.instance, e.digest}] = &mark{kept: true, recorded: true}
		default:
			delete(u.marks, key{e.instance, e.digest})
		}
		u.records++
		return nil
	}})
	return u, err
}

func (k key) record(verb string) []byte { return entry{blob, k.instance, k.digest}.record(verb) }

// begin records k, unless it is present, for a Put, which calls end. It returns false if there is no room.
func (u *unsent) begin(k key, present bool) (bool, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	m := u.marks[k]
	if m == nil {
		if len(u.marks) >= u.limit {
			return false, nil
		}
		m = &mark{kept: present, sent: present}
	} else if !present {
		m.sent = false // the blob has left the local store since another Put sent it
	}
	if !m.sent && !m.recorded {
		if err := u.record(k, m); err != nil {
			return false, writeError("list of blobs that are not in the upstream yet", err)
		}
	}
	u.marks[k] = m
	m.puts++
	return true, nil
}

// record appends a record of k. The caller holds mu.
func (u *unsent) record(k key, m *mark) error {
	if err := u.log.Append(k.record(added)); err != nil {
		return err
	}
	u.records++
	m.recorded = true
	return nil
}

// stored records that the local store has a copy.
func (u *unsent) stored(k key) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.marks[k].kept = true
}

// end ends a Put.
func (u *unsent) end(k key) {
	u.mu.Lock()
	defer u.mu.Unlock()
	m := u.marks[k]
	m.puts--
	u.strike(k, m)
}

// sent records that the upstream has ds, or that the journal of pending entries has them.
func (u *unsent) sent(instance string, ds ...cas.Digest) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.marks) == 0 {
		return
	}
	for _, d := range ds {
		k := key{instance, d}
		if m := u.marks[k]; m != nil {
			m.sent = true
			u.strike(k, m)
		}
	}
}

// lost records that neither store has ds: those that are being put are unsent from now on, except those that the
// upstream has just received, since the query may be older than the upload. A record that cannot be written is no
// error: after a restart, the blob counts as present until its next use.
func (u *unsent) lost(received *recent, instance string, ds ...cas.Digest) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.marks) == 0 {
		return
	}
	for _, d := range received.without(instance, ds) {
		k := key{instance, d}
		if m := u.marks[k]; m != nil && m.sent {
			m.sent = false
			_ = u.record(k, m)
		}
	}
}

// strike strikes out k unless it is or may become unsent, and removes its mark if no Put runs. A record that cannot be
// written is no error: after a restart the blob is put once more. The caller holds mu.
func (u *unsent) strike(k key, m *mark) {
	if !m.sent && (m.kept || m.puts > 0) {
		return
	}
	if m.puts == 0 {
		delete(u.marks, k)
	}
	if m.recorded {
		m.recorded = false
		if err := u.log.Append(k.record(struck)); err == nil {
			u.records++
		}
	}
	if u.records > 2*len(u.marks)+200 && !u.compacting && !u.closed {
		u.compacting = true
		u.work.Go(func() {
			u.mu.Lock()
			defer u.mu.Unlock()
			_ = u.compact() // the next strike tries again
			u.compacting = false
		})
	}
}

// compact rewrites the file with only the current records. The caller holds mu, which compact releases meanwhile. Only
// one call may run at a time.
func (u *unsent) compact() error {
	current, before := 0, u.records
	err := u.log.Compact(&u.mu, func(yield func([]byte) bool) {
		for k, m := range u.marks {
			if !m.recorded {
				continue
			}
			if current++; !yield(k.record(added)) {
				return
			}
		}
	})
	if err == nil {
		u.records += current - before
	}
	return err
}

// close closes the file. Blobs that are put afterwards fail.
func (u *unsent) close() error {
	u.mu.Lock()
	u.closed = true
	u.mu.Unlock()
	u.work.Wait()
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.log.Close()
}

// has adds the unsent blobs among ds to found.
func (u *unsent) has(instance string, ds []cas.Digest, found map[cas.Digest]bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.marks) == 0 {
		return
	}
	for _, d := range ds {
		if m := u.marks[key{instance, d}]; m != nil && !m.sent {
			found[d] = true
		}
	}
}

// prune removes the blobs that the local store no longer has. It opens each, since a disk may yet have to find out
// whether it has one.
func (o *Overlay) prune() error {
	u := o.unsent
	for k := range u.marks {
		in, err := o.config.Local(k.instance)
		if err != nil {
			continue
		}
		r, err := in.Store.Open(o.ctx, k.digest, 0)
		if err == nil {
			r.Close()
		} else if absentOrCorrupt(err) {
			delete(u.marks, k)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.records > len(u.marks) {
		return u.compact()
	}
	return nil
}
