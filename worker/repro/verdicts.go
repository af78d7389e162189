// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"container/list"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/durable"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// verdictsFile is the name of the file with a server's Verdicts. It contains the version of the format.
const verdictsFile = "verdicts.v1.log"

// Limits of Verdicts. The file has at most twice as many bytes, plus slack.
const (
	maxKnown      = 10_000  // actions
	maxKnownBytes = 8 << 20 // of their records
	slack         = 1 << 20
)

// VerdictsConfig configures Verdicts. The zero value keeps them in memory only.
type VerdictsConfig struct {
	// Dir is the directory of the file, for one process at a time. The lock of a store in it ensures that.
	Dir string
	// Sync makes verdicts survive a power failure before anybody sees them.
	Sync bool
	// MaxAge is the time after the last check at which a verdict expires; 0 means never.
	MaxAge time.Duration
	// Log receives warnings about damage and failed writes; nil discards them.
	Log *slog.Logger
}

// Verdicts hold why actions are not reproducible, one line each. With a file they survive the end of the process. A
// verdict is written before anybody sees it. While the file cannot be written, verdicts are only in memory; the next
// successful write includes them. The oldest verdicts are dropped beyond the limits.
//
// Use OpenVerdicts; the zero Verdicts is not usable. The methods are safe for concurrent use.
type Verdicts struct {
	config VerdictsConfig

	writing sync.Mutex   // held, before mu, by every change, so that the file has the same order
	log     *durable.Log // guarded by writing; nil without a file
	failed  bool         // guarded by writing; the file lacks verdicts, because the last write failed
	closed  bool         // guarded by writing

	mu    sync.Mutex // guards everything below
	known map[actionKey]reason
	order list.List // keys of known, oldest first
	bytes int64     // of the records of known
}

// A reason is why an action is not reproducible, or why that is unknown.
type reason struct {
	why string
	found
	at   int64 // seconds since 1970 when a check found it
	size int64 // of its record; 0 if it is not a verdict, and so not in the file
	elem *list.Element
}

// A found is what a verdict tells beyond its line.
type found struct {
	Target   string   `json:"target,omitempty"`
	Mnemonic string   `json:"mnemonic,omitempty"`
	Result   Result   `json:"result,omitempty"`
	Causes   []string `json:"causes,omitempty"`
}

// A record is the JSON form of a verdict in the file. Without Why it withdraws the verdict.
type record struct {
	Instance string `json:"instance,omitempty"`
	Action   string `json:"action"`
	Why      string `json:"why,omitempty"`
	Time     int64  `json:"time,omitempty"` // seconds since 1970
	found
}

// OpenVerdicts reads the verdicts of a file. It drops damaged records, which a power failure may leave, and warns about
// them. The caller closes the Verdicts when no checks run any more.
func OpenVerdicts(c VerdictsConfig) (*Verdicts, error) {
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	v := &Verdicts{config: c, known: map[actionKey]reason{}}
	if c.Dir == "" {
		return v, nil
	}
	var err error
	if v.log, err = v.read(); err != nil {
		return nil, err
	}
	if n := v.log.Damaged(); n > 0 || v.log.Torn() > 0 {
		c.Log.Warn("dropped damaged verdicts; their actions will be checked again", "file", v.log.Path, "lines", max(n, 1))
	}
	v.compact()
	return v, nil
}

// read reads the verdicts of the file and returns its log, which has written nothing yet.
func (v *Verdicts) read() (*durable.Log, error) {
	path := filepath.Join(v.config.Dir, verdictsFile)
	log, err := durable.Open(durable.Config{Path: path, Checksum: true, Sync: v.config.Sync, Replay: func(b []byte) error {
		k, r, err := decode(b)
		if err == nil {
			v.set(k, r)
		}
		return err
	}})
	if err != nil {
		return nil, fmt.Errorf("verdicts: %w", err)
	}
	return log, nil
}

// ReadVerdicts returns the verdicts in VerdictsConfig.Dir, the latest first, also expired ones. It changes nothing, and
// a server may be using the directory. Verdicts of earlier versions have only Time, Instance, Action and Line.
func ReadVerdicts(dir string) ([]*Summary, error) {
	v := &Verdicts{config: VerdictsConfig{Dir: dir}, known: map[actionKey]reason{}}
	if _, err := v.read(); err != nil {
		return nil, err
	}
	var all []*Summary
	for k, r := range v.known {
		all = append(all, &Summary{
			Time: time.Unix(r.at, 0), Instance: k.instance, Action: k.action, Target: r.Target, Mnemonic: r.Mnemonic,
			Result: r.Result, Causes: r.Causes, Line: r.why,
		})
	}
	slices.SortFunc(all, func(a, b *Summary) int {
		return cmp.Or(b.Time.Compare(a.Time), strings.Compare(a.Action.String(), b.Action.String()),
			strings.Compare(a.Instance, b.Instance))
	})
	return all, nil
}

// decode reads a record. A verdict of an earlier version, without a time, counts as new.
func decode(b []byte) (actionKey, reason, error) {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return actionKey{}, reason{}, durable.ErrDamaged
	}
	d, err := cas.ParseDigest(r.Action)
	if err != nil {
		return actionKey{}, reason{}, durable.ErrDamaged
	}
	why := strings.TrimSuffix(r.Why, "; see: cloister repro "+r.Action) // as earlier versions wrote it
	at := cmp.Or(r.Time, time.Now().Unix())
	return actionKey{r.Instance, d}, reason{why: why, found: r.found, at: at, size: int64(len(b))}, nil
}

// encode is the inverse of decode.
func encode(k actionKey, r reason) []byte {
	b, err := json.Marshal(record{k.instance, k.action.String(), r.why, r.at, r.found})
	if err != nil {
		panic(err) // strings only
	}
	return b
}

// of returns why an action is not known to be reproducible, "" if there is no reason, and whether that is a verdict.
func (v *Verdicts) of(k actionKey) (why string, verdict bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	r := v.known[k]
	if r.size > 0 && v.config.MaxAge > 0 && time.Since(time.Unix(r.at, 0)) > v.config.MaxAge {
		return "", false
	}
	return r.why, r.size > 0
}

// foundToday reports whether the verdict on an action is less than a day old.
func (v *Verdicts) foundToday(k actionKey) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return time.Since(time.Unix(v.known[k].at, 0)) < 24*time.Hour
}

// keep records that an action is not reproducible.
func (v *Verdicts) keep(k actionKey, why string, f found) {
	v.writing.Lock()
	defer v.writing.Unlock()
	if before, verdict := v.of(k); verdict && before == why && !v.failed && v.foundToday(k) {
		return
	}
	r := reason{why: why, found: f, at: time.Now().Unix()}
	b := encode(k, r)
	r.size = int64(len(b))
	v.write(b)
	v.change(k, r)
}

// suspect records, in memory, why an action cannot be checked, unless there is a verdict.
func (v *Verdicts) suspect(k actionKey, why string) {
	v.writing.Lock()
	defer v.writing.Unlock()
	if _, verdict := v.of(k); !verdict {
		v.change(k, reason{why: why})
	}
}

// forget records that an action is reproducible.
func (v *Verdicts) forget(k actionKey) {
	v.writing.Lock()
	defer v.writing.Unlock()
	v.mu.Lock()
	verdict := v.known[k].size > 0 // perhaps expired, but not for a server with a gate
	v.mu.Unlock()
	if verdict {
		v.write(encode(k, reason{}))
	}
	v.change(k, reason{})
}

// change calls set. The caller holds v.writing.
func (v *Verdicts) change(k actionKey, r reason) {
	v.mu.Lock()
	v.set(k, r)
	v.mu.Unlock()
	v.compact()
}

// set replaces the reason of an action, which keeps its place in the order. It drops the oldest ones beyond the limits.
// The caller holds v.mu or is alone.
func (v *Verdicts) set(k actionKey, r reason) {
	before, was := v.known[k]
	v.bytes -= before.size
	switch {
	case r.why != "" && was:
		r.elem = before.elem
	case r.why != "":
		r.elem = v.order.PushBack(k)
	case was:
		v.order.Remove(before.elem)
	}
	if r.why == "" {
		delete(v.known, k)
		return
	}
	v.known[k] = r
	v.bytes += r.size
	for v.order.Len() > maxKnown || v.bytes > maxKnownBytes {
		oldest := v.order.Remove(v.order.Front()).(actionKey)
		v.bytes -= v.known[oldest].size
		delete(v.known, oldest)
	}
}

// write adds a record to the file. If the last write failed it writes all of them. The caller holds v.writing.
func (v *Verdicts) write(b []byte) {
	switch {
	case v.log == nil || v.closed:
	case v.failed:
		v.note(v.log.Rewrite(v.records(b)))
	default:
		v.note(v.log.Append(b))
	}
}

// compact rewrites the file if most of it is obsolete. The caller holds v.writing or is alone.
func (v *Verdicts) compact() {
	if v.log == nil || v.closed || v.failed {
		return
	}
	v.mu.Lock()
	wasteful := v.log.Size() > 2*v.bytes+slack
	v.mu.Unlock()
	if wasteful {
		v.note(v.log.Rewrite(v.records()))
	}
}

// records returns the records of all verdicts, followed by more.
func (v *Verdicts) records(more ...[]byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		v.mu.Lock()
		defer v.mu.Unlock()
		for e := v.order.Front(); e != nil; e = e.Next() {
			k := e.Value.(actionKey)
			if r := v.known[k]; r.size > 0 && !yield(encode(k, r)) {
				return
			}
		}
		for _, b := range more {
			if !yield(b) {
				return
			}
		}
	}
}

// note logs that writing begins to fail or succeeds again. The caller holds v.writing or is alone.
func (v *Verdicts) note(err error) {
	if failed := err != nil; failed != v.failed {
		v.failed = failed
		if failed {
			v.config.Log.Warn("cannot write verdicts; new ones are lost when this process ends", "file", v.log.Path, "err", err)
		} else {
			v.config.Log.Info("verdicts are written again", "file", v.log.Path)
		}
	}
}

// Close retries a failed write and closes the file. Later verdicts stay in memory.
func (v *Verdicts) Close() error {
	v.writing.Lock()
	defer v.writing.Unlock()
	if v.closed || v.log == nil {
		return nil
	}
	if v.failed {
		v.note(v.log.Rewrite(v.records()))
	}
	v.closed = true
	return v.log.Close()
}

// Withhold returns next without the cached results of actions that are not known to be reproducible. A lookup finds
// nothing until a check finds the action reproducible.
func (v *Verdicts) Withhold(next cas.Instances) cas.Instances {
	return results.Filter(next, func(_ context.Context, instance string, action cas.Digest, _ *repb.ActionResult) string {
		why, _ := v.of(actionKey{instance, action})
		return why
	})
}
