// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
	"golang.org/x/sync/singleflight"
)

// LibraryFile is the name of the file with a server's Library. It contains the version of the format.
const LibraryFile = "images.v1.log"

// ErrNotAllowed is returned for an image in a registry that the operator has not allowed.
var ErrNotAllowed = errors.New("registry is not allowed")

// LibraryConfig configures a Library. Instances and Config.Function are required.
type LibraryConfig struct {
	// Config says how images are read; Store and Progress are filled in.
	Config
	// Path is the file, for one process at a time: the lock of the store that contains it ensures that. Without it,
	// images are forgotten when the process ends.
	Path      string
	Instances cas.Instances
	// Allowed lists the registries, as in Reference.In. Images that are present need none.
	Allowed []string
	// MaxPull is the longest time for one pull; 0 is 30 minutes.
	MaxPull time.Duration
	// TagAge is the time for which the digest of a tag is used before the registry is asked again; 0 is a minute. A
	// failure is remembered for a tenth of it.
	TagAge time.Duration
}

// maxPulls is the number of pulls that run at a time; others wait.
const maxPulls = 2

// A Library knows the images whose trees are in the stores of a server, and pulls others. What it knows survives the
// end of the process. Concurrent requests for an image share a pull, which ends when nobody waits for it any more.
//
// It protects no blobs: using a tree renews its leases, and an image whose blobs are gone is pulled again. Its methods
// are safe for concurrent use.
type Library struct {
	config  LibraryConfig
	ctx     context.Context // ends with Close
	cancel  context.CancelCauseFunc
	running sync.WaitGroup
	slots   chan struct{} // holds a value for each running pull

	mu      sync.Mutex // guards everything below
	log     *durable.Log
	entries map[entryKey]*Entry
	pulls   map[pullKey]*pull
	tags    map[string]tag // by reference
	// registries are those that were queried, by host.
	registries map[string]*registry

	queries singleflight.Group // of tags, by reference
}

type entryKey struct{ instance, reference string }

type pullKey struct {
	instance string
	pinned   string // the reference with a digest
}

// An Entry is an image of a Library.
type Entry struct {
	Instance string
	Image
	// Pinned is the reference with the digest that its tag had: of a manifest, or of an index for several platforms.
	Pinned string
	// Pulled is when the image was stored.
	Pulled time.Time
	// Loaded reports that the image came from a file instead of a registry.
	Loaded bool
}

// A record is the JSON form of an Entry in the file. Without Root it removes the entry.
type record struct {
	Instance  string    `json:"instance,omitempty"`
	Reference string    `json:"reference"`
	Pinned    string    `json:"pinned,omitempty"`
	Digest    string    `json:"digest,omitempty"`
	Root      string    `json:"root,omitempty"`
	Env       []string  `json:"env,omitempty"`
	Entries   int       `json:"entries,omitempty"`
	Files     int       `json:"files,omitempty"`
	Bytes     int64     `json:"bytes,omitempty"`
	Dropped   int       `json:"dropped,omitempty"`
	Pulled    time.Time `json:"pulled,omitzero"`
	Loaded    bool      `json:"loaded,omitempty"`
}

// OpenLibrary reads the file of a Library. Damaged records, which a power failure may leave, are dropped with a
// warning: their images are pulled again. The caller closes the Library.
func OpenLibrary(c LibraryConfig) (*Library, error) {
	switch {
	case c.Instances == nil:
		return nil, errors.New("image: LibraryConfig.Instances is missing")
	case c.Function == 0:
		return nil, errors.New("image: Config.Function is missing")
	}
	if c.MaxPull <= 0 {
		c.MaxPull = 30 * time.Minute
	}
	if c.TagAge <= 0 {
		c.TagAge = time.Minute
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	l := &Library{
		config: c, slots: make(chan struct{}, maxPulls),
		entries: map[entryKey]*Entry{}, pulls: map[pullKey]*pull{}, tags: map[string]tag{}, registries: map[string]*registry{},
	}
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	if c.Path == "" {
		return l, nil
	}
	records := 0
	var err error
	l.log, err = durable.Open(durable.Config{Path: c.Path, Checksum: true, Sync: true, Replay: func(b []byte) error {
		records++
		return l.replay(b)
	}})
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	if n := l.log.Damaged(); n > 0 || l.log.Torn() > 0 {
		c.Log.Warn("dropped damaged records of images; they will be pulled again", "file", c.Path, "lines", max(n, 1))
	}
	if records > 2*len(l.entries)+100 {
		if err := l.log.Rewrite(func(yield func([]byte) bool) {
			for _, e := range l.sorted() {
				if !yield(encode(e)) {
					return
				}
			}
		}); err != nil {
			c.Log.Warn("cannot compact the file of images", "err", err)
		}
	}
	return l, nil
}

func (l *Library) replay(b []byte) error {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return durable.ErrDamaged
	}
	key := entryKey{r.Instance, r.Reference}
	if r.Root == "" {
		delete(l.entries, key)
		return nil
	}
	root, err := cas.ParseDigest(r.Root)
	if err != nil {
		return durable.ErrDamaged
	}
	l.entries[key] = &Entry{
		Instance: r.Instance, Pinned: r.Pinned, Pulled: r.Pulled, Loaded: r.Loaded,
		Image: Image{
			Reference: r.Reference, Digest: r.Digest, Root: root, Env: r.Env, Entries: r.Entries, Files: r.Files,
			Bytes:   r.Bytes,
			Dropped: r.Dropped,
		},
	}
	return nil
}

func encode(e *Entry) []byte {
	return marshal(record{
		Instance: e.Instance, Reference: e.Reference, Pinned: e.Pinned, Digest: e.Digest, Root: e.Root.String(), Env: e.Env,
		Entries: e.Entries, Files: e.Files, Bytes: e.Bytes, Dropped: e.Dropped, Pulled: e.Pulled, Loaded: e.Loaded,
	})
}

func marshal(r record) []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings, numbers and a time
	}
	return b
}

// Close cancels all pulls, waits for them, and closes the file.
func (l *Library) Close() error {
	l.cancel(errors.New("the server is stopping"))
	l.running.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.log == nil {
		return nil
	}
	return l.log.Close()
}

// sorted returns the entries by instance and reference. The caller holds mu, or is the only one to have l.
func (l *Library) sorted() []*Entry {
	return slices.SortedFunc(maps.Values(l.entries), func(a, b *Entry) int {
		return strings.Compare(a.Instance+"\x00"+a.Reference, b.Instance+"\x00"+b.Reference)
	})
}

// List returns all images, by instance and reference. They may not be modified.
func (l *Library) List() []*Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sorted()
}

// Find returns the images of an instance that name identifies: a reference, a digest of the image, or at least 8 digits
// of such a digest.
func (l *Library) Find(instance, name string) []*Entry {
	ref, err := ParseReference(name)
	var found []*Entry
	for _, e := range l.List() {
		switch {
		case e.Instance != instance:
		case err == nil && (e.Reference == ref.String() || e.Pinned == ref.String()), e.hasDigest(name):
			found = append(found, e)
		}
	}
	return found
}

// hasDigest reports whether digest, or its beginning, is one by which e is known.
func (e *Entry) hasDigest(digest string) bool {
	_, pinned, _ := strings.Cut(e.Pinned, "@")
	for _, d := range []string{pinned, e.Digest} {
		hash := strings.TrimPrefix(d, "sha256:")
		if d != "" && (d == digest || len(digest) >= 8 && strings.HasPrefix(hash, digest)) {
			return true
		}
	}
	return false
}

// Remove removes images from the Library. Their blobs stay in the store until it evicts them.
func (l *Library) Remove(entries ...*Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var records [][]byte
	for _, e := range entries {
		records = append(records, marshal(record{Instance: e.Instance, Reference: e.Reference}))
	}
	if err := l.append(records...); err != nil {
		return err
	}
	for _, e := range entries {
		delete(l.entries, entryKey{e.Instance, e.Reference})
		delete(l.tags, e.Reference)
	}
	return nil
}

// append writes records. The caller holds mu.
func (l *Library) append(records ...[]byte) error {
	if l.log == nil {
		return nil
	}
	return l.log.Append(records...)
}

// add records e, whose blobs are stored.
func (l *Library) add(e *Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.append(encode(e)); err != nil {
		return err
	}
	l.entries[entryKey{e.Instance, e.Reference}] = e
	return nil
}

// Pin returns ref with a digest, and pulls nothing. A tag resolves to the image that was loaded under that name, or
// else to the digest that its registry reported at most TagAge ago. Pin returns ErrNotAllowed if the image is not
// present and its registry is not allowed; other errors are those of Resolve. If the registry does not answer or
// asks for a retry, the error has a method Temporary() bool that returns true.
func (l *Library) Pin(ctx context.Context, instance string, ref Reference) (string, error) {
	digest := ref.Digest()
	if digest == "" {
		if e, err := l.Loaded(instance, ref); err == nil {
			return e.Pinned, nil
		}
	}
	switch {
	case digest != "" && l.find(instance, digest, cas.Digest{}) != nil:
	case !ref.In(l.config.Allowed):
		return "", fmt.Errorf("image %s: %w: %s", ref, ErrNotAllowed, ref.Registry())
	case digest == "":
		var err error
		if digest, err = l.resolve(ctx, ref); err != nil {
			return "", err
		}
	}
	return ref.Pin(digest), nil
}

// Get returns the image ref as an input tree of an instance, and pulls it if necessary. Pin resolves a tag.
//
// Nothing checks that the blobs are still in the store. A caller that finds some missing calls Get again with that root
// as stale; then the image is pulled even if it is known. Errors are ErrNotAllowed, and those of Pull.
func (l *Library) Get(ctx context.Context, instance string, ref Reference, stale cas.Digest) (*Entry, error) {
	pinned, err := l.Pin(ctx, instance, ref)
	if err != nil {
		return nil, err
	}
	_, digest, _ := strings.Cut(pinned, "@")
	if e := l.find(instance, digest, stale); e != nil {
		return l.named(e, ref, pinned)
	}
	if !ref.In(l.config.Allowed) {
		return nil, fmt.Errorf("image %s: the store has evicted it, and its %w: load it again", ref, ErrNotAllowed)
	}
	return l.pull(ctx, instance, ref, digest)
}

// named returns e under the tag ref, which it may not have yet. A reference with a digest needs no name of its own.
func (l *Library) named(e *Entry, ref Reference, pinned string) (*Entry, error) {
	if ref.Digest() != "" || e.Pinned == pinned && e.Reference == ref.String() {
		return e, nil
	}
	l.mu.Lock()
	known := l.entries[entryKey{e.Instance, ref.String()}]
	l.mu.Unlock()
	if known != nil && known.Pinned == pinned && known.Root == e.Root {
		return known, nil
	}
	alias := *e
	alias.Reference, alias.Pinned, alias.Loaded = ref.String(), pinned, false // it is what the registry said
	return &alias, l.add(&alias)
}

// find returns an image of an instance with this digest and another root than stale, or nil.
func (l *Library) find(instance, digest string, stale cas.Digest) *Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.Instance == instance && e.hasDigest(digest) && e.Root != stale {
			return e
		}
	}
	return nil
}

// Loaded returns the image that was loaded under the name ref, or cas.ErrNotFound.
func (l *Library) Loaded(instance string, ref Reference) (*Entry, error) {
	for _, e := range l.Find(instance, ref.String()) {
		if e.Loaded {
			return e, nil
		}
	}
	return nil, fmt.Errorf("no image %s was loaded for instance %q: %w", ref, instance, cas.ErrNotFound)
}

// Load stores the image at path, a directory or a file, under the name as, or under its own one if that is "". selector
// selects one of several images, as in Load.
func (l *Library) Load(ctx context.Context, instance, path, selector, as string) (*Entry, error) {
	in, err := l.config.Instances(instance)
	if err != nil {
		return nil, err
	}
	c := l.config.Config
	c.Store = in.Store
	im, err := Load(ctx, c, path, selector)
	if err != nil {
		return nil, err
	}
	if as == "" {
		// The tag of a layout is often no more than that.
		if as = im.Reference; !strings.ContainsAny(as, ":/") {
			return nil, fmt.Errorf("load image %+.256q: %w: it has no name of its own", filepath.Base(path), cas.ErrInvalid)
		}
	}
	ref, err := ParseReference(as)
	if err != nil {
		return nil, err
	}
	im.Reference = ref.String()
	e := &Entry{Instance: instance, Image: *im, Pinned: ref.Pin(im.Digest), Pulled: time.Now().UTC(), Loaded: true}
	return e, l.add(e)
}
