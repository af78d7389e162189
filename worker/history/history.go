// SPDX-License-Identifier: Apache-2.0

// Package history records a server's answers across restarts, one entry each, and finds them by build, target, mnemonic
// or digest. Failures also keeps the results of failed actions, since the action cache has only successes. The
// history is not evidence: clients describe themselves, and entries may be lost.
//
// Entries are lines of JSON in the segments of a directory. One goroutine writes; Add never blocks:
//
//	Add ---> buffer of 4096 ---> one goroutine ---> newest segment ---> reduced to its failures ---> deleted
//	           `--- full: lost, and counted in the next entry
//
// Failures stay interesting longer than successes, so the oldest segment is first rewritten with only its failures, and
// deleted later. A success stays if its action failed before, and runs that were cancelled or lost do not.
//
// Readers read segments backwards, block by block, and decode only the lines that contain the filter's texts.
//
// A database such as bbolt would cost a write per index and a sync per entry, and its file never shrinks. Without an
// index a search reads everything, but a million entries, 400 MB, take 0.45 s, and most searches end in the newest
// block. Entries are not synced.
package history

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// How is the kind of an answer.
type How string

// Kinds of answers. Executed and Cached are answers of Execute, Found and Absent of GetActionResult, Uploaded of
// UpdateActionResult.
const (
	Executed How = "executed"
	Cached   How = "cached"
	Found    How = "found"
	Absent   How = "absent"
	Uploaded How = "uploaded"
	Checked  How = "checked" // re-run to compare the results
)

// An Entry is one answer. Add truncates texts and makes them printable, except for valid instance names: access depends
// on those, so two of them must not become equal.
type Entry struct {
	// Number is the position of the entry, from 1. Add sets it.
	Number uint64 `json:"n"`
	// Time is the time of the answer.
	Time time.Time `json:"time"`
	// Instance is valid for cas.CheckInstanceName exactly if the name passed to Add was.
	Instance string `json:"instance,omitempty"`
	How      How    `json:"how"`
	// Action is the action's digest as text.
	Action string `json:"action"`
	// Caller is the authenticated caller, "" if the server authenticates nobody or no caller asked for this.
	Caller string `json:"caller,omitempty"`
	// Unverified request metadata of the client.
	Invocation string `json:"invocation,omitempty"`
	Correlated string `json:"correlated,omitempty"`
	Target     string `json:"target,omitempty"`
	Mnemonic   string `json:"mnemonic,omitempty"`
	// Code is the gRPC code of the answer, Exit the exit code of the result.
	Code int32 `json:"code,omitempty"`
	Exit int32 `json:"exit,omitempty"`
	// Message says why an action failed without a result, and Response is the digest of the ExecuteResponse of one that
	// failed with a result, if that was stored. At most one of them is set. Of a check, Response is the repro.Verdict in
	// JSON.
	Message  string `json:"message,omitempty"`
	Response string `json:"response,omitempty"`
	// Result is the Identity of the result, "" if there is none.
	Result string `json:"result,omitempty"`
	// Manifest is the digest of the run's manifest, StableHash the hash by which manifests are compared.
	Manifest   string `json:"manifest,omitempty"`
	StableHash string `json:"stable,omitempty"`
	Worker     string `json:"worker,omitempty"`
	// Waited is the time spent waiting for a slot, Prepared the time until the command started, Ran its run time, and
	// Stored the time until its outputs were stored, in nanoseconds.
	Waited   time.Duration `json:"waited,omitempty"`
	Prepared time.Duration `json:"prepared,omitempty"`
	Ran      time.Duration `json:"ran,omitempty"`
	Stored   time.Duration `json:"stored,omitempty"`
	// Verdict is the result of a check: "same", "differs", "flaky exit".
	Verdict string `json:"verdict,omitempty"`
	// Lost is the number of entries before this one that could not be written. Add sets it.
	Lost int64 `json:"lost,omitempty"`
}

// Failed reports whether the answer was an error or a non-zero exit code. A lookup without result is no failure.
func (e *Entry) Failed() bool { return e.Code != 0 || e.Exit != 0 }

// maxText bounds the bytes of each text of an entry, and maxMessage those of its Message; longer texts are truncated.
const (
	maxText    = 512
	maxMessage = 2048
)

// bound makes the texts of e printable and short.
func (e *Entry) bound() {
	for _, s := range []*string{
		&e.Action, &e.Caller, &e.Invocation, &e.Correlated, &e.Target, &e.Mnemonic, &e.Result,
		&e.Manifest, &e.StableHash, &e.Worker, &e.Verdict, &e.Response,
	} {
		*s = printable.Head(*s, maxText)
	}
	e.Message = printable.Head(e.Message, maxMessage)
	e.How = How(printable.Head(string(e.How), maxText))
	if cas.CheckInstanceName(e.Instance) != nil {
		e.Instance = "//" + printable.Head(e.Instance, maxText) // invalid, too
	}
}

// Identity returns a hash of a result's outputs, stdout, stderr and exit code, independent of their order and of the
// execution metadata: 32 hexadecimal digits, or "" for nil.
func Identity(r *repb.ActionResult) string {
	if r == nil {
		return ""
	}
	lines := []string{fmt.Sprintf("exit %d", r.ExitCode)}
	add := func(kind, path string, d *repb.Digest, raw []byte, more string) {
		if d == nil && len(raw) > 0 {
			sum := sha256.Sum256(raw)
			d = &repb.Digest{Hash: hex.EncodeToString(sum[:]), SizeBytes: int64(len(raw))}
		}
		if d.GetSizeBytes() > 0 || path != "" {
			lines = append(lines, kind+" "+strconv.Quote(path)+" "+d.GetHash()+"/"+strconv.FormatInt(d.GetSizeBytes(), 10)+more)
		}
	}
	add("stdout", "", r.StdoutDigest, r.StdoutRaw, "")
	add("stderr", "", r.StderrDigest, r.StderrRaw, "")
	for _, f := range r.OutputFiles {
		more := ""
		if f.IsExecutable {
			more = " executable"
		}
		add("file", f.Path, f.Digest, f.Contents, more)
	}
	for _, d := range r.OutputDirectories {
		lines = append(lines, fmt.Sprintf("directory %q %s/%d %s/%d", d.Path, d.TreeDigest.GetHash(), d.TreeDigest.GetSizeBytes(),
			d.RootDirectoryDigest.GetHash(), d.RootDirectoryDigest.GetSizeBytes()))
	}
	for _, links := range [][]*repb.OutputSymlink{r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks} {
		for _, l := range links {
			lines = append(lines, fmt.Sprintf("link %q %q", l.Path, l.Target))
		}
	}
	slices.Sort(lines)
	lines = slices.Compact(lines) // a symlink may be listed in two fields
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return hex.EncodeToString(sum[:16])
}

// A Filter selects entries for which all its set fields hold. Match compares the texts.
type Filter struct {
	Instance                                 string // compared in full, unless Instances is set
	Invocation, Correlated, Target, Mnemonic string
	// Action is a prefix of the digest, with or without the digest function.
	Action string
	// Instances, if not nil, selects the instances instead of Instance.
	Instances func(name string) bool
	// Failed selects only failures.
	Failed bool
	// Distinct selects only the newest entry of each action, ignoring checks, which no client requested.
	Distinct bool
	// kept selects only entries with a Response.
	kept bool
	// Before, if not 0, selects only entries with lower numbers.
	Before uint64
}

// bound returns f with its texts bounded as those of entries are.
func (f Filter) bound() Filter {
	for _, s := range []*string{&f.Invocation, &f.Correlated, &f.Target, &f.Mnemonic, &f.Action} {
		*s = printable.Head(*s, maxText)
	}
	return f
}

// matches reports whether f selects e, except for Distinct.
func (f *Filter) matches(e *Entry) bool {
	_, hash, named := strings.Cut(e.Action, ":")
	return f.instance(e.Instance) && (!f.kept || e.Response != "") && (f.Before == 0 || e.Number < f.Before) && (!f.Failed || e.Failed()) &&
		(strings.HasPrefix(e.Action, f.Action) || named && strings.HasPrefix(hash, f.Action)) &&
		Match(f.Invocation, e.Invocation) && Match(f.Correlated, e.Correlated) &&
		Match(f.Target, e.Target) && Match(f.Mnemonic, e.Mnemonic)
}

func (f *Filter) instance(name string) bool {
	if f.Instances != nil {
		return f.Instances(name)
	}
	return name == f.Instance
}

// Match reports whether text is equal to pattern, begins with it if pattern ends in an asterisk, or is a target of its
// package or one below if pattern ends in /... as in //pkg/... of Bazel. An empty pattern matches everything.
func Match(pattern, text string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(text, prefix)
	}
	if label, ok := strings.CutSuffix(pattern, "/..."); ok {
		return strings.HasPrefix(text, label+"/") || strings.HasPrefix(text, label+":")
	}
	return pattern == "" || pattern == text
}

// needles returns texts that occur in the line of every entry that f matches, the longest and so rarest first.
func (f *Filter) needles() [][]byte {
	var all []string
	for _, t := range []string{f.Action, f.Invocation, f.Target, f.Correlated, f.Mnemonic} {
		t = strings.TrimSuffix(strings.TrimSuffix(t, "*"), "/...")
		escaped := strings.ContainsFunc(t, func(r rune) bool { return r < ' ' || r > '~' || strings.ContainsRune(`"\<>&`, r) })
		if t != "" && !escaped { // JSON escapes vary
			all = append(all, t)
		}
	}
	slices.SortStableFunc(all, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	needles := make([][]byte, len(all))
	for i, t := range all {
		needles[i] = []byte(t)
	}
	return needles
}
