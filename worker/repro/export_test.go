// SPDX-License-Identifier: Apache-2.0

package repro

// Waiting returns the number of pending checks.
func (s *Sampler) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.backlog)
}
