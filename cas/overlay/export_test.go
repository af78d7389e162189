// SPDX-License-Identifier: Apache-2.0

package overlay

// LimitUnsent sets the maximum number of unsent blobs. There are no concurrent writes.
func (o *Overlay) LimitUnsent(n int) { o.unsent.limit = n }

// AwaitCompaction waits until the list of unsent blobs is not being compacted.
func (o *Overlay) AwaitCompaction() { o.unsent.work.Wait() }
