// SPDX-License-Identifier: Apache-2.0

package casserver

// Chunking returns the number of chunking calls, running or waiting, and the number of their callers. impl is the
// implementation of ContentAddressableStorage.
func Chunking(impl any) (callers, calls int) { return impl.(*storage).chunkings.counts() }

// Trees is Chunking for GetTree.
func Trees(impl any) (callers, calls int) { return impl.(*storage).trees.counts() }

func (l *limiter) counts() (callers, calls int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, own := range l.callers {
		calls += own.calls
	}
	return len(l.callers), calls
}
