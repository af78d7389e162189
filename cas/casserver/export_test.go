// SPDX-License-Identifier: Apache-2.0

package casserver

// Chunking returns the number of chunking calls, running or waiting, and the number of their callers. impl is the
// implementation of ContentAddressableStorage.
func Chunking(impl any) (callers, calls int) {
	c := impl.(*storage).chunkings
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, own := range c.callers {
		calls += own.calls
	}
	return len(c.callers), calls
}
