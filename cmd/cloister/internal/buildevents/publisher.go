// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/protobuf/proto"
)

const (
	// maxEvent bounds a stored event, so that it fits a message of 4 MiB, the default limit of gRPC's clients.
	maxEvent = 3 << 20
	// maxEssential bounds an event that is stored although its build has reached its limit.
	maxEssential = 64 << 10
)

// An event is a google.devtools.build.v1.BuildEvent and its position in the build, from 1.
type event struct {
	number int64
	data   []byte
	final  bool  // it ends the stream
	err    error // if not nil: no event, but the end of the call
}

// A publisher adds events to a build.
type publisher struct {
	store *Store
	*record
}

// publish returns a publisher for a build, which it creates if events begin at number 1. While the build is open, it
// counts towards the limit of the client with the key opener. The caller of publish closes the publisher.
func (s *Store) publish(h Header, opener string, first int64) (*publisher, error) {
	if !invocationID.MatchString(h.ID) {
		return nil, fmt.Errorf("%w: invocation id %+.80q is not a lower-case UUID", ErrInvalid, h.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.builds[h.ID]
	opens := r == nil || r.publishers == 0
	switch {
	case r != nil && (r.Instance != h.Instance || r.Caller != h.Caller):
		return nil, ErrOwner
	case r == nil && first != 1:
		return nil, ErrGap
	case opens && s.opened[opener] >= maxCallerOpen && s.open >= maxOpen/2:
		return nil, fmt.Errorf("%w: this client has %d, and all clients have %d of at most %d; retry later",
			ErrBusy, s.opened[opener], s.open, maxOpen)
	case opens && s.open >= maxOpen:
		return nil, fmt.Errorf("%w: all clients have %d, which is the limit; retry later", ErrBusy, maxOpen)
	case r == nil:
		// An earlier build of this id may have been removed while it was published. Its events do not belong to this one.
		if err := os.Remove(s.path(h.ID, eventsSuffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		r = &record{Header: h, size: fileBytes, changed: make(chan struct{})}
		r.Received = time.Now().UTC().Round(0)
		if err := s.writeHeader(r.Header); err != nil {
			return nil, err
		}
		s.add(r)
	}
	if r.publishers++; opens {
		s.open++
		s.opened[opener]++
		r.opener = opener
	}
	return &publisher{s, r}, nil
}

func (s *Store) writeHeader(h Header) error {
	text, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return durable.WriteFile(s.path(h.ID, headerSuffix), text, 0o600)
}

// close releases the publisher. Another call may continue the build.
func (p *publisher) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.store.mu.Lock()
	defer p.store.mu.Unlock()
	if p.publishers--; p.publishers == 0 {
		p.store.open--
		if p.store.opened[p.opener]--; p.store.opened[p.opener] == 0 {
			delete(p.store.opened, p.opener)
		}
		if p.log != nil {
			_ = p.log.Close() // every write was synced
			p.log = nil
		}
	}
	p.store.notify(p.record)
}

// append stores events and returns how many of them are durable, also those that were stored before.
func (p *publisher) append(events []event) (int, error) {
	n, size, err := p.write(events)
	s := p.store
	s.mu.Lock()
	if s.builds[p.ID] == p.record {
		s.resize(p.record, fileBytes+size)
	}
	excess := s.trim(p.record)
	for _, r := range excess {
		s.remove(r)
		s.notify(r)
	}
	s.notify(p.record)
	s.mu.Unlock()
	if n > 0 && events[n-1].final {
		p.finish()
	}
	return n, err
}

// write writes the events that are new and returns the size of the file.
func (p *publisher) write(events []event) (n int, size int64, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.openLog(); err != nil {
		return 0, 0, err
	}
	var lines [][]byte
	size, last, final := p.log.Size(), p.last, p.final
	for _, e := range events {
		if e.number > last {
			switch {
			case final:
				err = ErrFinished
			case e.number != last+1:
				err = fmt.Errorf("%w: number %d follows %d", ErrGap, e.number, last)
			}
			line := p.store.encode(e, size)
			if size += int64(len(line)) + 16; size > p.store.maxBuild/4*5 && err == nil {
				err = fmt.Errorf("%w of invocation %s", ErrFull, p.ID)
			}
			if err != nil {
				break
			}
			lines, last, final = append(lines, line), e.number, e.final
		}
		n++
	}
	if !p.gone.Load() { // else the client continues, but nothing is kept
		if failed := p.log.Append(lines...); failed != nil {
			return 0, p.log.Size(), failed
		}
	}
	p.last, p.final = last, final
	return n, p.log.Size(), err
}

// openLog opens the log and finds its last event. Those of an earlier process may not be synced.
func (p *publisher) openLog() (err error) {
	if p.log != nil {
		return nil
	}
	var last event
	l, err := durable.Open(durable.Config{
		Path: p.store.path(p.ID, eventsSuffix), Checksum: true, Sync: true,
		Replay: func(line []byte) (err error) {
			last.number, last.data, err = decode(line)
			return err
		},
	})
	if err == nil {
		err = l.Flush()
	}
	if err != nil {
		return err
	}
	var m bespb.BuildEvent
	p.log = l
	if !p.gone.Load() {
		p.last = last.number
		p.final = proto.Unmarshal(last.data, &m) == nil && m.GetComponentStreamFinished() != nil
	}
	return nil
}

// finish writes the facts of a build whose events are complete.
func (p *publisher) finish() {
	b, err := p.store.Invocation(p.ID)
	if err == nil {
		p.store.mu.Lock()
		defer p.store.mu.Unlock()
		if p.store.builds[p.ID] != p.record {
			return
		}
		if p.Facts = b.Facts; p.Status == Running {
			p.Status = "" // no event tells the end
		}
		err = p.store.writeHeader(p.Header)
		p.store.notify(p.record)
	}
	if err != nil && !p.gone.Load() {
		p.store.cfg.Log.Warn("cannot write the summary of a build", "invocation", p.ID, "err", err)
	}
}

// encode returns the line of an event in a file of that size: its number, a space, and its data in base64. Beyond the
// limits it is only the number, so that the build can continue; the few events about its end are kept.
func (s *Store) encode(e event, size int64) []byte {
	line := strconv.AppendInt(nil, e.number, 10)
	if len(e.data) == 0 {
		return line
	}
	fits := len(e.data) <= maxEvent && size+int64(base64.RawStdEncoding.EncodedLen(len(e.data))) <= s.maxBuild
	if !fits && (len(e.data) > maxEssential || !essential(e.data)) {
		return line
	}
	return base64.RawStdEncoding.AppendEncode(append(line, ' '), e.data)
}

// decode returns the number and the data of an event, which is nil if it was not stored.
func decode(line []byte) (int64, []byte, error) {
	number, text, stored := bytes.Cut(line, []byte(" "))
	n, err := strconv.ParseInt(string(number), 10, 64)
	if err != nil || !stored {
		return n, nil, damaged(err)
	}
	data, err := base64.RawStdEncoding.AppendDecode([]byte{}, text)
	return n, data, damaged(err)
}

func damaged(err error) error {
	if err != nil {
		return durable.ErrDamaged
	}
	return nil
}

// essential reports whether an event says how the build ended.
func essential(data []byte) bool {
	var m bespb.BuildEvent
	if proto.Unmarshal(data, &m) != nil {
		return false
	}
	e := payload(&m)
	return m.GetComponentStreamFinished() != nil || e.GetFinished() != nil || e.GetBuildToolLogs() != nil ||
		e.GetBuildMetrics() != nil || e.GetTestSummary() != nil
}
