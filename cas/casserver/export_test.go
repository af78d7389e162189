// SPDX-License-Identifier: Apache-2.0

package casserver

// Chunking returns the callers whose blobs the implementation of ContentAddressableStorage chunks, or who wait for that,
// and the number of their calls.
func Chunking(impl any) (callers, calls int) {
	c := impl.(*storage).chunkings
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, own := range c.callers {
		calls += own.calls
	}
	return len(c.callers), calls
}
