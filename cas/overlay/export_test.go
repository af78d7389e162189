// SPDX-License-Identifier: Apache-2.0

package overlay

import "github.com/cloister-build/cloister/cas"

// LimitUnsent sets the maximum number of unsent blobs. There are no concurrent writes.
func (o *Overlay) LimitUnsent(n int) { o.unsent.limit = n }

// Unsent reports whether the local store has a blob of the instance "" that the upstream lacks.
func (o *Overlay) Unsent(d cas.Digest) bool {
	o.unsent.mu.Lock()
	defer o.unsent.mu.Unlock()
	m := o.unsent.marks[key{"", d}]
	return m != nil && m.kept && !m.sent
}

// HoldSent blocks recordSent, after it has struck out an unsent blob, until release is called.
func (o *Overlay) HoldSent() (release func()) {
	o.uses.mu.Lock()
	return o.uses.mu.Unlock
}

// AwaitCompaction waits until the list of unsent blobs is not being compacted.
func (o *Overlay) AwaitCompaction() { o.unsent.work.Wait() }

// FillRenewals fills the renewal queue with entries that need no renewal.
func (o *Overlay) FillRenewals() {
	o.uses.mu.Lock()
	defer o.uses.mu.Unlock()
	o.uses.due = make([]entry, maxDue)
}
