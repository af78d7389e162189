// SPDX-License-Identifier: Apache-2.0

package service

// Default and minimum of Config.Memory, in bytes.
const (
	DefaultMemory = 256 << 20
	MinMemory     = 32 << 20
)

// caches are the limits in bytes of the caches in memory.
type caches struct {
	messages   int64 // decoded Actions, Commands and Directories
	operations int64 // completed operations, which clients may still ask for
	streams    int64 // log streams of clients
	checks     int64 // results that wait for a check of their reproducibility
	subtrees   int64 // digests of recently used subtrees of inputs, which are mounted when used again
}

// divide divides memory among the caches.
func divide(memory int64) caches {
	part := memory / 32
	return caches{messages: 8 * part, operations: 12 * part, streams: 7 * part, checks: 3 * part, subtrees: 2 * part}
}
