// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// VerdictsFile is what the file of a server's Verdicts is called. A change of the format changes it.
const VerdictsFile = "verdicts.v1.log"

// How much Verdicts hold, in memory and in their file, which has twice as many bytes and slack more at most.
const (
	maxKnown      = 10_000  // actions; the oldest goes
	maxKnownBytes = 8 << 20 // of their lines
	slack         = 1 << 20 // bytes of the file for which it is not written anew
)

// VerdictsConfig says where Verdicts are kept. The zero value keeps them in memory alone.
type VerdictsConfig struct {
	// Path is the file. No other process may have it open for writing: the store, in whose directory it lies, sees to that.
	Path string
	// Sync has each verdict on the disk before it is told, so that it outlives a loss of power.
	Sync bool
	// Log is told of damage, and when the file cannot be written, and can again; nil discards that.
	Log *slog.Logger
}

// Verdicts are what is known of actions that are not reproducible: why, in a line. Those with a file outlive the process, however
// it ends. The file is a log of lines, each a checksum and what became known then. A line is written before anybody is told what
// it says. As long as the file cannot be written, what becomes known is known to the process alone; it is written
// with the next that can be.
//
// The methods are safe for concurrent use.
type Verdicts struct {
	VerdictsConfig

	writing sync.Mutex // held, before mu, by whoever changes anything, so that the file has the same order
	file    *os.File   // guarded by writing; nil if there is none, or none that can be added to
	size    int64      // guarded by writing; of file, in bytes
	bad     bool       // guarded by writing; the last write failed
	closed  bool       // guarded by writing

	mu    sync.Mutex // guards everything below
	known map[subject]finding
	order list.List // of the subjects of known, the oldest first
	bytes int64     // of the lines of known
}

// A finding is what is known of an action.
type finding struct {
	why   string
	size  int64 // of its line in the file; 0 where it is in none, since it is no verdict
	place *list.Element
}

// A line is one of the file, as JSON behind the checksum of that. Without Why the action is not known to differ any more.
type line struct {
	Instance string `json:"instance,omitempty"`
	Action   string `json:"action"`
	Why      string `json:"why,omitempty"`
}

// OpenVerdicts reads what is known. What is no line, as a loss of power leaves it, is passed over, and Log told how much there was.
// That the file cannot be written is no error. The caller closes what it returns when nothing is checked any more.
func OpenVerdicts(c VerdictsConfig) (*Verdicts, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	v := &Verdicts{VerdictsConfig: c, known: map[subject]finding{}}
	if c.Path == "" {
		return v, nil
	}
	data, err := os.ReadFile(c.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("verdicts: %w", err)
	}
	damaged := 0
	for text := range bytes.Lines(data) {
		if k, why, ok := decode(text); ok {
			v.set(k, finding{why: why, size: int64(len(text))})
		} else {
			damaged++
		}
	}
	if damaged > 0 {
		c.Log.Warn("damaged verdicts: whether these actions are reproducible is to be found out again", "file", c.Path, "lines", damaged)
	}
	switch v.size = int64(len(data)); {
	case v.size == 0:
		return v, nil // the first verdict makes the file
	case damaged > 0 || v.wasteful():
		err = v.rewrite(nil)
	default:
		v.file, err = os.OpenFile(c.Path, os.O_WRONLY|os.O_APPEND, 0)
	}
	v.note(err)
	return v, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// decode reads a line of the file, with its end.
func decode(b []byte) (k subject, why string, ok bool) {
	text, whole := bytes.CutSuffix(b, []byte("\n"))
	stated, text, _ := bytes.Cut(text, []byte(" "))
	sum, err := strconv.ParseUint(string(stated), 16, 32)
	var l line
	if !whole || err != nil || uint32(sum) != crc32.Checksum(text, castagnoli) || json.Unmarshal(text, &l) != nil {
		return subject{}, "", false
	}
	d, err := cas.ParseDigest(l.Action)
	why = strings.TrimSuffix(l.Why, "; see: cloister repro "+l.Action) // as earlier versions wrote
	return subject{l.Instance, d}, why, err == nil
}

// encode is the inverse of decode.
func encode(k subject, why string) []byte {
	text, err := json.Marshal(line{k.instance, k.action.String(), why})
	if err != nil {
		panic(err) // of three texts
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.Checksum(text, castagnoli), text)
}

// of returns why an action is held for not reproducible, and whether that is a verdict; "" if it is not.
func (v *Verdicts) of(k subject) (why string, verdict bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f := v.known[k]
	return f.why, f.size > 0
}

// keep remembers the verdict on an action that is not reproducible, in one line of ASCII.
func (v *Verdicts) keep(k subject, why string) {
	v.writing.Lock()
	defer v.writing.Unlock()
	if before, verdict := v.of(k); verdict && before == why && !v.bad {
		return
	}
	text := encode(k, why)
	v.append(text)
	v.change(k, finding{why: why, size: int64(len(text))})
}

// suspect remembers, as long as the process is there, why no verdict on an action can be had, unless one is known.
func (v *Verdicts) suspect(k subject, why string) {
	v.writing.Lock()
	defer v.writing.Unlock()
	if _, verdict := v.of(k); !verdict {
		v.change(k, finding{why: why})
	}
}

// forget ends what is known of an action.
func (v *Verdicts) forget(k subject) {
	v.writing.Lock()
	defer v.writing.Unlock()
	if _, verdict := v.of(k); verdict {
		v.append(encode(k, ""))
	}
	v.change(k, finding{})
}

// change is set for whoever holds v.writing alone.
func (v *Verdicts) change(k subject, f finding) {
	v.mu.Lock()
	v.set(k, f)
	v.mu.Unlock()
	if v.file != nil && v.wasteful() {
		v.note(v.rewrite(nil))
	}
}

// set replaces what is known of an action, which keeps its place in the order; the oldest go if there is too much. The
// caller holds v.mu, or is alone.
func (v *Verdicts) set(k subject, f finding) {
	before, was := v.known[k]
	v.bytes -= before.size
	switch {
	case f.why != "" && was:
		f.place = before.place
	case f.why != "":
		f.place = v.order.PushBack(k)
	case was:
		v.order.Remove(before.place)
	}
	if f.why == "" {
		delete(v.known, k)
		return
	}
	v.known[k] = f
	v.bytes += f.size
	for v.order.Len() > maxKnown || v.bytes > maxKnownBytes {
		oldest := v.order.Remove(v.order.Front()).(subject)
		v.bytes -= v.known[oldest].size
		delete(v.known, oldest)
	}
}

// wasteful reports whether most of the file is what is not known any more. The caller holds v.writing, or is alone.
func (v *Verdicts) wasteful() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.size > 2*v.bytes+slack
}

// append adds a line to the file, or writes that anew where nothing can be added. The caller holds v.writing.
func (v *Verdicts) append(text []byte) {
	if v.Path == "" || v.closed {
		return
	}
	if v.file == nil {
		v.note(v.rewrite(text))
		return
	}
	_, err := v.file.Write(text)
	if err == nil && v.Sync {
		err = v.file.Sync()
	}
	if err == nil {
		v.size += int64(len(text))
	} else {
		_ = v.file.Truncate(v.size) // a part of the line may be there, which the next process would call damage
	}
	v.note(err)
}

// rewrite makes the file anew of what is known and, behind that, more. The caller holds v.writing, or is alone.
func (v *Verdicts) rewrite(more []byte) error {
	var all bytes.Buffer
	v.mu.Lock()
	for e := v.order.Front(); e != nil; e = e.Next() {
		k := e.Value.(subject)
		if f := v.known[k]; f.size > 0 {
			all.Write(encode(k, f.why))
		}
	}
	v.mu.Unlock()
	all.Write(more)
	f, err := os.OpenFile(v.Path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(all.Bytes())
	if err == nil {
		err = f.Sync() // else a loss of power could leave neither the old file nor the new one
	}
	if err == nil {
		err = os.Rename(f.Name(), v.Path) // from here on it is the file
	}
	if err == nil && v.Sync {
		err = syncDirectory(filepath.Dir(v.Path))
	}
	if err != nil {
		_ = os.Remove(f.Name()) // there is little room
		return errors.Join(err, f.Close())
	}
	if v.file != nil {
		_ = v.file.Close() // nothing of it is wanted any more
	}
	v.file, v.size = f, int64(all.Len())
	return nil
}

// syncDirectory has the names in a directory on the disk.
func syncDirectory(name string) error {
	if runtime.GOOS == "windows" {
		return nil // which cannot, and has them there
	}
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// note tells the log that the file cannot be written, or can again. One that could not be is made anew next: it lacks a line.
// The caller holds v.writing, or is alone.
func (v *Verdicts) note(err error) {
	if err != nil && v.file != nil {
		_ = v.file.Close() // the error is known
		v.file = nil
	}
	if bad := err != nil; bad != v.bad {
		v.bad = bad
		if bad {
			v.Log.Warn("verdicts cannot be written: what becomes known is lost with this process", "file", v.Path, "err", err)
		} else {
			v.Log.Info("verdicts can be written again", "file", v.Path)
		}
	}
}

// Close writes what could not be written, if that is possible now, and closes the file. What becomes known later stays in memory.
func (v *Verdicts) Close() error {
	v.writing.Lock()
	defer v.writing.Unlock()
	if v.closed {
		return nil
	}
	v.closed = true
	if v.bad {
		v.note(v.rewrite(nil))
	}
	if v.file == nil {
		return nil
	}
	f := v.file
	v.file = nil // so that what ends later does not make it anew, either
	return f.Close()
}

// Withhold returns next without what is recorded of actions that are held for not reproducible, whoever recorded it: a lookup
// finds nothing, until a check finds the action the same.
func (v *Verdicts) Withhold(next cas.Instances) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil {
			return nil, err
		}
		without := *in
		without.Actions = withheld{in.Actions, v, name}
		return &without, nil
	}
}

// withheld is an action cache without such actions.
type withheld struct {
	cas.ActionCache
	verdicts *Verdicts
	instance string
}

// Lookup implements cas.ActionCache.
func (w withheld) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if why, _ := w.verdicts.of(subject{w.instance, action}); why != "" {
		return nil, fmt.Errorf("result of action %s: withheld: %s: %w", action, why, cas.ErrNotFound)
	}
	return w.ActionCache.Lookup(ctx, action)
}
