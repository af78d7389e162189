// SPDX-License-Identifier: Apache-2.0

// Package toolchain identifies the parts of a host that every action may read, and notices when they change. An
// action's digest does not cover them, so a cached result that another compiler produced must not be served.
//
// A fingerprint is a hash of names, types, modes, sizes, modification times and targets of symlinks, as in make and
// rsync; contents are not read. Machines made from one disk image or container image have the same fingerprint.
// Directories named __pycache__ do not count: Python writes them when it first imports a module.
package toolchain

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// A Scan is the state of a toolchain at one time.
type Scan struct {
	// Fingerprint is a SHA-256 in hexadecimal.
	Fingerprint string
	// Entries is the number of files, directories and symlinks.
	Entries int
	// directories are the modification times of the directories in nanoseconds, which change with their entries.
	directories map[string]int64
	// files holds the inputs that are not directories, by source; the entry of an absent one is zero.
	files map[string]entry
}

// Read scans the sources of inputs. A directory that this user may not list is hashed as unreadable. It reads
// directories concurrently.
func Read(ctx context.Context, inputs []sandbox.Input) (*Scan, error) {
	s := &scanner{ctx: ctx, slots: make(chan struct{}, 2*runtime.GOMAXPROCS(0)), scan: Scan{
		directories: map[string]int64{}, files: map[string]entry{},
	}}
	for _, in := range inputs {
		if !slices.ContainsFunc(inputs, func(other sandbox.Input) bool { return below(in.Source, other.Source) }) {
			s.add(in.Target, in.Source)
		} else { // /bin may be a link to /usr/bin
			s.record(in.Target, []byte(in.Source), 1, nil)
		}
	}
	s.running.Wait()
	if err := cmp.Or(s.err, ctx.Err()); err != nil {
		return nil, fmt.Errorf("toolchain: %w", err)
	}
	slices.Sort(s.hashes) // of whole directories, which were read in any order
	sum := sha256.New()
	for _, h := range s.hashes {
		sum.Write([]byte(h))
	}
	s.scan.Fingerprint = hex.EncodeToString(sum.Sum(nil))
	return &s.scan, nil
}

// below reports whether the path a is below b.
func below(a, b string) bool { return strings.HasPrefix(a, b+"/") }

// current reports whether no directory has gained, lost or replaced an entry since the scan, and no input that is a file
// has changed.
func (s *Scan) current() bool {
	for path, modified := range s.directories {
		if now, err := modifiedAt(path); err != nil || now != modified {
			return false
		}
	}
	for path, e := range s.files {
		if now, _ := entryAt(path); now != e {
			return false
		}
	}
	return true
}

// A scanner collects the hashes of directories.
type scanner struct {
	ctx     context.Context
	slots   chan struct{}
	running sync.WaitGroup

	mu     sync.Mutex // guards everything below
	scan   Scan
	hashes []string
	err    error // the error whose text sorts first, so that repeated scans return the same one
}

// An entry describes a file, directory or symlink.
type entry struct {
	name     string
	mode     fs.FileMode
	size     int64
	modified int64 // in nanoseconds since 1970
	link     string
}

// add hashes the file or directory at source, which actions see at target.
func (s *scanner) add(target, source string) {
	e, err := entryAt(source)
	if e.mode.IsDir() {
		s.directory(target, source, e.modified)
		return
	}
	s.scan.files[source] = e // only the goroutine of Read calls add
	if err != nil {
		s.record(target, nil, 0, err)
		return
	}
	e.name = filepath.Base(target)
	s.record(target, e.append(nil), 1, nil)
}

// entryAt returns the entry at path.
func entryAt(path string) (entry, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return entry{}, err
	}
	e := entry{name: info.Name(), mode: info.Mode(), size: info.Size(), modified: info.ModTime().UnixNano()}
	if e.mode.Type() == fs.ModeSymlink {
		if e.link, err = os.Readlink(path); err != nil {
			return entry{}, err
		}
	}
	return e, nil
}

// absent reports whether list omits an entry whose reading failed with err: it was just removed or replaced, which
// changes the directory, or only its owner may read it, as in a FUSE file system.
func absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EINVAL) || errors.Is(err, fs.ErrPermission)
}

// directory hashes a directory and those below it.
func (s *scanner) directory(target, source string, modified int64) {
	s.mu.Lock()
	s.scan.directories[source] = modified
	s.mu.Unlock()
	select {
	case s.slots <- struct{}{}:
		s.running.Go(func() {
			defer func() { <-s.slots }()
			s.read(target, source)
		})
	default:
		s.read(target, source)
	}
}

func (s *scanner) read(target, source string) {
	if s.ctx.Err() != nil {
		return
	}
	entries, err := list(source)
	if errors.Is(err, fs.ErrPermission) {
		s.record(target, []byte("unreadable"), 0, nil)
		return
	}
	if err != nil {
		s.record(target, nil, 0, err)
		return
	}
	text := make([]byte, 0, 80*len(entries))
	for _, e := range entries {
		if e.name == "__pycache__" {
			continue
		}
		text = e.append(text)
		if e.mode.IsDir() {
			s.directory(target+"/"+e.name, source+"/"+e.name, e.modified)
		}
	}
	s.record(target, text, len(entries), nil)
}

// append appends a description of e to text. The size and time of a directory follow from its entries, and differ
// between file systems; those of a symlink add nothing to its target.
func (e *entry) append(text []byte) []byte {
	text = append(strconv.AppendQuote(text, e.name), ' ')
	text = append(strconv.AppendUint(text, uint64(e.mode), 8), ' ')
	switch e.mode.Type() {
	case fs.ModeDir:
	case fs.ModeSymlink:
		text = strconv.AppendQuote(text, e.link)
	default:
		text = append(strconv.AppendInt(text, e.size, 10), ' ')
		text = strconv.AppendInt(text, e.modified, 10)
	}
	return append(text, '\n')
}

// record adds the hash of a text that describes entries of target.
func (s *scanner) record(target string, text []byte, entries int, err error) {
	h := sha256.New()
	h.Write(append(strconv.AppendQuote(nil, target), '\n'))
	h.Write(text)
	sum := string(h.Sum(nil))
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // removed since it was listed
	}
	if err != nil && (s.err == nil || err.Error() < s.err.Error()) {
		s.err = err
	}
	s.hashes = append(s.hashes, sum)
	s.scan.Entries += entries
}

// How old a scan may be before it is checked: in the background, and before Fingerprint returns. A check compares
// directories, and every rescanInterval everything, because a program that writes into a file changes no directory.
// A failed scan is repeated after retryInterval while no fingerprint is known. Otherwise the interval doubles with each
// failure, up to the usual one: an upgrade may make one scan fail, and a scan that always fails must not load the disk.
const (
	backgroundAge  = 2 * time.Second
	blockingAge    = 5 * time.Second
	retryInterval  = 5 * time.Second
	rescanInterval = time.Minute
)

// maxWait is the longest time for which Fingerprint waits: on a slow disk, the first scan may take minutes. It is a
// variable for tests.
var maxWait = time.Minute

// maxLoad bounds the part of the time, as its inverse, that repeated scans take on a slow disk.
const maxLoad = 50

// A Watch keeps the fingerprint of a toolchain current while callers request it. It is safe for concurrent use.
type Watch struct {
	inputs []sandbox.Input
	log    *slog.Logger
	ctx    context.Context
	stop   context.CancelFunc
	now    func() time.Time

	mu       sync.Mutex // guards everything below
	scan     *Scan
	scanned  time.Time     // when the last successful scan began
	tried    time.Time     // when the last scan began, successful or not
	took     time.Duration // duration of the last scan
	failure  string        // error of the last scan, or ""
	failures int           // scans that failed since the last successful one
	checked  time.Time
	checking chan struct{} // closed when the check in progress ends; nil without one
	running  sync.WaitGroup
}

// NewWatch returns a Watch of the toolchain that the inputs name, and begins to scan it. log receives changes; nil
// discards them. The caller closes the Watch.
func NewWatch(inputs []sandbox.Input, log *slog.Logger) *Watch {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	w := &Watch{inputs: slices.Clone(inputs), log: log, now: time.Now, scan: &Scan{}}
	w.ctx, w.stop = context.WithCancel(context.Background())
	w.begin()
	return w
}

// begin begins a check. The caller holds mu, or has not shared w yet.
func (w *Watch) begin() {
	w.checking = make(chan struct{})
	w.running.Go(w.check)
}

// Fingerprint returns the fingerprint, or "" if the toolchain cannot be read or its first scan takes longer than a
// minute, for which Fingerprint waits. Later changes appear within a few seconds, or within a minute if neither a
// directory nor an input that is a file changes.
func (w *Watch) Fingerprint() string {
	fingerprint, checking, age := w.last()
	if checking == nil || age < blockingAge {
		return fingerprint
	}
	wait := time.NewTimer(maxWait)
	defer wait.Stop()
	select {
	case <-checking:
	case <-wait.C:
	}
	return w.Last()
}

// Scanned returns the result of Fingerprint and the time when the last successful scan of all files began.
func (w *Watch) Scanned() (fingerprint string, began time.Time) {
	w.Fingerprint()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.scan.Fingerprint, w.scanned
}

// Last is Fingerprint without waiting.
func (w *Watch) Last() string {
	fingerprint, _, _ := w.last()
	return fingerprint
}

// last returns the last fingerprint, its age and the check in progress, which it begins if that is necessary.
func (w *Watch) last() (fingerprint string, checking chan struct{}, age time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	age = w.now().Sub(w.checked)
	if age >= backgroundAge && w.checking == nil && w.ctx.Err() == nil {
		w.begin()
	}
	return w.scan.Fingerprint, w.checking, age
}

// check scans the toolchain again if that is necessary.
func (w *Watch) check() {
	w.mu.Lock()
	scan, tried, failure, failures, interval := w.scan, w.tried, w.failure, w.failures, max(rescanInterval, maxLoad*w.took)
	w.mu.Unlock()
	if scan.Fingerprint == "" {
		interval = retryInterval
	} else if failures > 0 {
		interval = min(interval, retryInterval<<min(failures-1, 10))
	}
	began := w.now()
	// Do not repeat a failed scan at once: every check would read everything again, even on an idle machine.
	due := began.Sub(tried) >= interval || failure == "" && !scan.current()
	next, err := scan, error(nil)
	if due {
		next, err = Read(w.ctx, w.inputs)
	}
	took := w.now().Sub(began)
	w.mu.Lock()
	defer w.mu.Unlock()
	if due && w.ctx.Err() == nil {
		w.tried, w.took, w.failure = began, took, ""
		if err != nil {
			w.failure = err.Error()
			w.failures++
		} else {
			w.scan, w.scanned, w.failures = next, began, 0
		}
		w.report(scan, failure)
	}
	w.checked = began
	close(w.checking)
	w.checking = nil
}

// report logs what the last scan changed. scan and failure are the values before it. The caller holds mu.
func (w *Watch) report(scan *Scan, failure string) {
	switch {
	case w.failure == failure && failure != "": // reported before
	case w.failure != "" && scan.Fingerprint == "":
		w.log.Warn("cannot scan the toolchain of this host; until that succeeds, its cached results are misses and new ones are "+
			"not cached", "err", w.failure)
	case w.failure != "":
		w.log.Warn("cannot scan the toolchain of this host; its last fingerprint applies", "err", w.failure)
	case scan.Fingerprint != "" && w.scan.Fingerprint != scan.Fingerprint:
		w.log.Warn("the toolchain of this host changed; cached results of the previous one are misses",
			"before", scan.Fingerprint, "after", w.scan.Fingerprint)
	case failure != "":
		w.log.Info("scanned the toolchain of this host after errors")
	}
}

// Close ends a check in progress. Fingerprint returns the last fingerprint afterwards.
func (w *Watch) Close() {
	w.stop()
	w.running.Wait()
}
