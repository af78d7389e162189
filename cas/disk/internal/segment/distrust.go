// SPDX-License-Identifier: Apache-2.0

package segment

import "errors"

// After a failed flush it is unknown what reached the disk. The kernel may have dropped data that it could not write,
// and reports this only once, so a later successful flush proves nothing. Segments whose last puts were not known to be
// durable are therefore lost: nothing is appended to them or marked as durable in them until the caller has rewritten
// their entries to other segments and removed them.

// ErrDistrusted means that a failed flush may have lost data that has not been rewritten yet.
var ErrDistrusted = errors.New("a failed flush may have lost data that has not been rewritten yet")

// Distrust records that a flush failed with err, and marks the affected segments as lost.
func (s *Set) Distrust(err error) {
	s.appending.Lock()
	s.failures++
	s.failure = err
	for _, g := range s.Segments() {
		g.logging.Lock()
		if g.puts > g.durable || g.size.Load() > 0 && g.puts == 0 { // or its data could not be synced
			g.lost = true
			g.growing.Store(false)
		}
		g.logging.Unlock()
	}
	s.appending.Unlock()
	if s.Config.Distrusted != nil {
		s.Config.Distrusted(err)
	}
}

// Failures returns the number of failed flushes.
func (s *Set) Failures() uint32 {
	s.appending.RLock()
	defer s.appending.RUnlock()
	return s.failures
}

// Trusted returns the number of failed flushes after which everything was written again. It is the Item.Failures of a
// file that is known only by its record: such a record must not leave a lost segment before the file was written again.
func (s *Set) Trusted() uint32 {
	s.appending.RLock()
	defer s.appending.RUnlock()
	return s.trusted
}

// Failure returns why the last flush failed, or nil if all flushes succeeded since the last Trust.
func (s *Set) Failure() error {
	s.appending.RLock()
	defer s.appending.RUnlock()
	return s.failure
}

// Lost returns the segments with data that a failed flush may have lost.
func (s *Set) Lost() (lost []*Segment) {
	for _, g := range s.Segments() {
		if g.isLost() {
			lost = append(lost, g)
		}
	}
	return lost
}

func (g *Segment) isLost() bool {
	g.logging.Lock()
	defer g.logging.Unlock()
	return g.lost && g.log != nil
}

// Trust forgets the last failure if the number of failures is still the given one, and reports whether it is.
func (s *Set) Trust(failures uint32) bool {
	s.appending.Lock()
	defer s.appending.Unlock()
	if s.failures != failures {
		return false
	}
	s.failure, s.trusted = nil, failures
	return true
}
