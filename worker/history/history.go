// SPDX-License-Identifier: Apache-2.0

// Package history remembers what a server was asked to do and what it answered, beyond a restart: one entry an answer,
// found again by build, target, mnemonic or digest. It keeps no result and no blob, decides nothing, and is no evidence:
// nobody vouches for what clients say of themselves, and entries may be lost.
//
// Entries are lines of JSON in segments of a directory. One goroutine writes; whoever adds an entry never waits for it:
//
//	Add ---> room for 4096 ---> one goroutine ---> the newest segment ---> deleted, too old or too many
//	           `--- none: lost, and counted in the next entry
//
// Readers read segments backwards, a block at a time, and decode only lines that hold the texts which are looked for.
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
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// How an action was answered.
type How string

// The ways. Executed and Cached are answers of Execute, Found and Absent those of GetActionResult, and Uploaded is one of
// UpdateActionResult.
const (
	Executed How = "executed"
	Cached   How = "cached"
	Found    How = "found"
	Absent   How = "absent"
	Uploaded How = "uploaded"
	Checked  How = "checked" // it was run again, to see whether its result is the same
)

// An Entry is one answer. Texts that a client chose are cut and made printable when the entry is added, but for Instance: who
// may read one must not read those of another whose name, cut or quoted, would be the same.
type Entry struct {
	// Number orders the entries, from 1 on. Add sets it.
	Number uint64 `json:"n"`
	// Time is when it was answered.
	Time time.Time `json:"time"`
	// Instance is a name that cas.CheckInstanceName permits, or else one that it does not permit either.
	Instance string `json:"instance,omitempty"`
	How      How    `json:"how"`
	// Action is its digest, as cas.Digest has it as a text.
	Action string `json:"action"`
	// What the client said of itself; nobody vouches for it.
	Invocation string `json:"invocation,omitempty"`
	Correlated string `json:"correlated,omitempty"`
	Target     string `json:"target,omitempty"`
	Mnemonic   string `json:"mnemonic,omitempty"`
	// Code is that of the answer, a code of gRPC, and Exit the exit code of a result.
	Code int32 `json:"code,omitempty"`
	Exit int32 `json:"exit,omitempty"`
	// Result is what Identity returns of the result, "" if there is none.
	Result string `json:"result,omitempty"`
	// Manifest is the digest of the run's manifest, and StableHash what it is equal by.
	Manifest   string `json:"manifest,omitempty"`
	StableHash string `json:"stable,omitempty"`
	Worker     string `json:"worker,omitempty"`
	// Waited and Ran are how long it waited for a slot and how long its command ran, in nanoseconds.
	Waited time.Duration `json:"waited,omitempty"`
	Ran    time.Duration `json:"ran,omitempty"`
	// Verdict is what a check came to: "same", "differs", "flaky exit".
	Verdict string `json:"verdict,omitempty"`
	// Lost is how many entries before this one could not be written. Add sets it.
	Lost int64 `json:"lost,omitempty"`
}

// Failed reports whether the answer was otherwise than a result with exit code 0. That a lookup found nothing is no
// failure.
func (e *Entry) Failed() bool { return e.Code != 0 || e.Exit != 0 }

// MaxText bounds the texts of an entry, in bytes; longer ones are cut.
const MaxText = 512

// bound makes the texts of e printable and short.
func (e *Entry) bound() {
	for _, s := range []*string{&e.Action, &e.Invocation, &e.Correlated, &e.Target, &e.Mnemonic, &e.Result,
		&e.Manifest, &e.StableHash, &e.Worker, &e.Verdict} {
		*s = printable(*s)
	}
	e.How = How(printable(string(e.How)))
	if cas.CheckInstanceName(e.Instance) != nil {
		e.Instance = "//" + printable(e.Instance) // which is no instance either
	}
}

// printable returns s with everything that is not a printable character written as in a Go string, cut to MaxText
// bytes. What it returns it leaves as it is.
func printable(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		text := s[:size]
		switch {
		case r == utf8.RuneError && size == 1:
			text = fmt.Sprintf(`\x%02x`, s[0])
		case !strconv.IsPrint(r):
			q := strconv.QuoteRuneToASCII(r)
			text = q[1 : len(q)-1]
		}
		if b.Len()+len(text) > MaxText {
			break
		}
		b.WriteString(text)
		s = s[size:]
	}
	return b.String()
}

// Identity returns a text that is equal for equal results: those with the same outputs, stdout, stderr and exit code,
// in whatever order they are listed and whatever else is said of the run. It is 32 hexadecimal digits, "" for nil.
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
	lines = slices.Compact(lines) // a link may be listed by two names
	sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
	return hex.EncodeToString(sum[:16])
}

// A Filter says which entries are wanted: those of which everything is true that is set. A text that ends in an
// asterisk stands for all that begin so.
type Filter struct {
	Instance                                 string // always, as a whole
	Invocation, Correlated, Target, Mnemonic string
	// Action is how the digest begins, its hash or all of its text.
	Action string
	// Failed wants only entries that have.
	Failed bool
	// Distinct wants of each action the newest entry alone, of those that are answers: nobody asked for a check.
	Distinct bool
	// Before wants only entries of lower numbers, if it is not 0.
	Before uint64
}

// printable returns f with its texts as those of entries are.
func (f Filter) printable() Filter {
	for _, s := range []*string{&f.Invocation, &f.Correlated, &f.Target, &f.Mnemonic, &f.Action} {
		*s = printable(*s)
	}
	return f
}

// admits reports whether e is wanted.
func (f *Filter) admits(e *Entry) bool {
	_, hash, named := strings.Cut(e.Action, ":")
	return e.Instance == f.Instance && (f.Before == 0 || e.Number < f.Before) && (!f.Failed || e.Failed()) &&
		(strings.HasPrefix(e.Action, f.Action) || named && strings.HasPrefix(hash, f.Action)) &&
		holds(f.Invocation, e.Invocation) && holds(f.Correlated, e.Correlated) && holds(f.Target, e.Target) && holds(f.Mnemonic, e.Mnemonic)
}

func holds(wanted, text string) bool {
	if prefix, ok := strings.CutSuffix(wanted, "*"); ok {
		return strings.HasPrefix(text, prefix)
	}
	return wanted == "" || wanted == text
}

// marks returns texts each of which is in the line of every entry that f admits. To look for the rarest first is cheapest.
func (f *Filter) marks() [][]byte {
	var all []string
	for _, t := range []string{f.Action, f.Invocation, f.Target, f.Correlated, f.Mnemonic} {
		t = strings.TrimSuffix(t, "*")
		// What JSON writes otherwise than it is, is not looked for.
		if t != "" && !strings.ContainsFunc(t, func(r rune) bool { return r < ' ' || r > '~' || strings.ContainsRune(`"\\<>&`, r) }) {
			all = append(all, t)
		}
	}
	slices.SortStableFunc(all, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	marks := make([][]byte, len(all))
	for i, t := range all {
		marks[i] = []byte(t)
	}
	return marks
}
