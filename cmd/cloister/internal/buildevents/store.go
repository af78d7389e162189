// SPDX-License-Identifier: Apache-2.0

// Package buildevents stores the events that Bazel publishes about builds, and summarizes them. It implements the Build
// Event Service (google.devtools.build.v1) and cloister.v1.Builds.
//
// A build has two files, named by its invocation id: ID.json, its Header, and ID.events, a checksummed log with a
// record per event, which is synced before the event is acknowledged. The oldest builds are removed when all together
// exceed a limit. Events are only the client's claims, except for the caller of their Header.
package buildevents

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas/durable"
)

// Errors of a Store.
var (
	ErrUnknown  = errors.New("no build events for this invocation")
	ErrInvalid  = errors.New("invalid build event")
	ErrOwner    = errors.New("another caller or instance publishes the events of this invocation")
	ErrGap      = errors.New("earlier events of this invocation are missing")
	ErrFinished = errors.New("the events of this invocation are complete")
	ErrFull     = errors.New("too many build events")
	ErrBusy     = errors.New("too many builds publish events")
)

const (
	headerSuffix, eventsSuffix = ".json", ".events"
	// DefaultBytes is a good Config.MaxBytes: hundreds of builds of ordinary size.
	DefaultBytes = 256 << 20
	// fileBytes is charged for each build besides its events, which bounds the number of builds.
	fileBytes = 16 << 10
	// maxBuildBytes bounds the events of a build, unless a quarter of Config.MaxBytes is less.
	maxBuildBytes = 64 << 20
	// defaultIdle is long, since Bazel publishes nothing while one long action runs, and continues a stream only a few
	// times.
	defaultIdle = time.Hour
	// maxOpen bounds the builds that are published at once, and maxCallerOpen those of one caller at one address while
	// half of maxOpen are published: all machines behind one address translation may be one caller.
	maxOpen       = 1000
	maxCallerOpen = maxOpen / 4
)

// invocationID is the syntax of an invocation id, which becomes the name of a file.
var invocationID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Config configures a Store.
type Config struct {
	// Dir is created if it is absent. Only one process may use it: the lock of the store around it ensures that.
	Dir string
	// MaxBytes limits the size of all events.
	MaxBytes int64
	// Idle is how long a client may be silent while it publishes a build; 0 means an hour.
	Idle time.Duration
	// Log receives failures to write; nil discards them.
	Log *slog.Logger
}

// A Header identifies a build. Once the build has ended it also has the Facts of its events.
type Header struct {
	ID       string    `json:"invocation"`
	Instance string    `json:"instance"`
	Caller   string    `json:"caller,omitempty"` // authenticated; "" if the server knows no callers
	Received time.Time `json:"received"`         // when the first event arrived
	// Publishing is whether a client is publishing further events.
	Publishing bool `json:"publishing,omitempty"`
	Facts
}

// settle sets the status of a build whose events do not tell its end.
func (h *Header) settle() {
	if h.Status == "" {
		if h.Status = Interrupted; h.Publishing {
			h.Status = Running
		}
	}
}

// A Store has the events of recent builds. Its methods are safe for concurrent use.
type Store struct {
	cfg      Config
	maxBuild int64

	mu      sync.Mutex
	builds  map[string]*record
	order   []*record // oldest first
	total   int64
	sizes   map[string]int64 // of all builds, by caller
	open    int              // builds with a publisher
	opened  map[string]int   // of these, the number by caller key
	changed chan struct{}    // closed by the next change of any build
}

// A record is a build of a Store. The lock of the Store guards the fields up to changed, that of the record the others.
type record struct {
	Header
	size       int64
	publishers int
	opener     string        // the key in Store.opened while there are publishers
	changed    chan struct{} // closed by the next change
	gone       atomic.Bool   // removed from the Store

	mu    sync.Mutex
	log   *durable.Log // nil until it is needed
	last  int64        // number of the last event in the log
	final bool         // that event is the end of the stream
}

// Open opens the store in c.Dir. It needs no closing: every file is closed by the call that writes it.
func Open(c Config) (*Store, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Idle <= 0 {
		c.Idle = defaultIdle
	}
	s := &Store{
		cfg: c, maxBuild: min(maxBuildBytes, c.MaxBytes/4), builds: map[string]*record{}, sizes: map[string]int64{},
		opened: map[string]int{}, changed: make(chan struct{}),
	}
	err := os.MkdirAll(c.Dir, 0o700) // builds are private
	if err == nil {
		err = s.load()
	}
	if err != nil {
		return nil, fmt.Errorf("build events %s: %w", c.Dir, err)
	}
	for _, r := range s.trim(nil) {
		s.remove(r)
	}
	return s, nil
}

// load reads the headers, and removes files that a killed process left without one.
func (s *Store) load() error {
	files, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		id, isHeader := strings.CutSuffix(f.Name(), headerSuffix)
		if !isHeader || !invocationID.MatchString(id) {
			continue
		}
		text, err := durable.ReadFile(s.path(id, headerSuffix))
		if err != nil {
			return err
		}
		r := &record{changed: make(chan struct{}), size: fileBytes}
		if json.Unmarshal(text, &r.Header) != nil || r.ID != id {
			s.cfg.Log.Warn("removing the events of a build with a damaged header", "file", s.path(id, headerSuffix))
			s.remove(&record{Header: Header{ID: id}})
			continue
		}
		switch fi, err := os.Stat(s.path(id, eventsSuffix)); {
		case err == nil:
			r.size += fi.Size()
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		s.add(r)
	}
	slices.SortFunc(s.order, func(a, b *record) int { return cmp.Or(a.Received.Compare(b.Received), cmp.Compare(a.ID, b.ID)) })
	for _, f := range files {
		id, _, _ := strings.Cut(strings.TrimPrefix(f.Name(), "."), ".")
		if s.builds[id] == nil && invocationID.MatchString(id) {
			s.removeFile(f.Name()) // it is not found under any name
		}
	}
	return nil
}

func (s *Store) path(id, suffix string) string { return filepath.Join(s.cfg.Dir, id+suffix) }

// remove removes the files of a build.
func (s *Store) remove(r *record) {
	r.gone.Store(true)
	for _, suffix := range []string{headerSuffix, eventsSuffix} { // without a header the rest is removed at the next start
		s.removeFile(r.ID + suffix)
	}
}

func (s *Store) removeFile(name string) {
	if err := os.Remove(filepath.Join(s.cfg.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Log.Warn("cannot remove the events of a build", "err", err)
	}
}

// add adds a build. The caller holds s.mu or has exclusive access.
func (s *Store) add(r *record) {
	size := r.size
	r.size = 0
	s.builds[r.ID], s.order = r, append(s.order, r)
	s.resize(r, size)
}

// resize sets the size of a build. The caller holds s.mu or has exclusive access.
func (s *Store) resize(r *record, size int64) {
	s.total += size - r.size
	if s.sizes[r.Caller] += size - r.size; s.sizes[r.Caller] == 0 {
		delete(s.sizes, r.Caller)
	}
	r.size = size
}

// trim forgets builds other than keep until the others fit, and returns them. The next one is always the oldest of the
// caller whose builds take most, so that nobody can displace the builds of others. The caller holds s.mu or has
// exclusive access.
func (s *Store) trim(keep *record) (excess []*record) {
	for s.total > s.cfg.MaxBytes {
		largest, most := "", int64(-1)
		for caller, size := range s.sizes {
			if keep != nil && caller == keep.Caller {
				size -= keep.size
			}
			if size > most || size == most && caller < largest {
				largest, most = caller, size
			}
		}
		i := slices.IndexFunc(s.order, func(r *record) bool { return r != keep && r.Caller == largest })
		if i < 0 {
			break // only keep is left, which has a limit of its own
		}
		r := s.order[i]
		s.order = slices.Delete(s.order, i, i+1)
		s.resize(r, 0)
		delete(s.builds, r.ID)
		excess = append(excess, r)
	}
	return excess
}

// notify wakes those who wait for a change of r. The caller holds s.mu.
func (s *Store) notify(r *record) {
	close(r.changed)
	close(s.changed)
	r.changed, s.changed = make(chan struct{}), make(chan struct{})
}

// List returns the headers of at most limit builds of selected instances, newest first.
func (s *Store) List(limit int, selected func(instance string) bool) []Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Header
	for _, r := range slices.Backward(s.order) {
		if len(all) == limit {
			break
		}
		if selected(r.Instance) {
			all = append(all, r.header())
		}
	}
	return all
}

// header returns the header as of now. The caller holds the lock of the Store.
func (r *record) header() Header {
	h := r.Header
	h.Publishing = r.publishers > 0
	h.settle()
	return h
}

// Header returns the header of a build, or ErrUnknown.
func (s *Store) Header(id string) (Header, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.builds[id]
	if r == nil {
		return Header{}, ErrUnknown
	}
	return r.header(), nil
}

// Changed returns a channel that is closed when events of the build arrive or its publisher disconnects. For the id ""
// it is closed when that happens to any build.
func (s *Store) Changed(id string) (<-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id == "" {
		return s.changed, nil
	}
	r := s.builds[id]
	if r == nil {
		return nil, ErrUnknown
	}
	return r.changed, nil
}

// Events calls visit for the stored events of a build in order, each a google.devtools.build.v1.BuildEvent, and returns
// the number of those that were not stored. It stops at an error of visit, which it returns. Each call
// reads the whole file.
func (s *Store) Events(id string, visit func(event []byte) error) (missing int64, err error) {
	if _, err := s.Header(id); err != nil {
		return 0, err
	}
	var stored, last int64
	_, err = durable.Open(durable.Config{Path: s.path(id, eventsSuffix), Checksum: true, Replay: func(line []byte) error {
		n, event, err := decode(line)
		if err != nil {
			return err
		}
		last = n
		if event == nil {
			return nil
		}
		stored++
		return visit(event)
	}})
	return last - stored, err
}

// Invocation returns the summary of a build, or ErrUnknown.
func (s *Store) Invocation(id string) (*Build, error) {
	h, err := s.Header(id)
	if err != nil {
		return nil, err
	}
	b := NewBuild(h)
	if b.Missing, err = s.Events(id, b.Add); err != nil {
		return nil, err
	}
	return b.Finish(), nil
}
