// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A Spec is everything one run may see and use. It is plain data; its zero value permits nothing.
//
// Every path of the run is absolute, clean and named Target. Where bytes come from on this host is a
// Source, which never becomes part of the Spec's text: two hosts that run the same thing have the same
// text.
type Spec struct {
	Args []string // program and arguments, at least one
	Dir  string   // the working directory, inside a Target
	Env  []string // exactly these variables, "KEY=VALUE", sorted by key, each key once

	// Inputs are what may be read (set I). A later input may lie inside an earlier one.
	Inputs []Input
	// Outputs are the directories that may be written and outlive the run (set O).
	Outputs []Output
	// Temp are private directories that are thrown away (set T).
	Temp []Temp
	// Network is what may be reached (set N). Its zero value is nothing at all.
	Network Network
	// Limits bound what the run may use. Every one must be set: none is without end by omission.
	Limits Limits
	// Audit is how closely the run is watched. Its zero value records every attempt that was refused.
	Audit Audit
	// Conditions are what the run notices of its surroundings. Their zero value is the usual.
	Conditions Conditions

	// Workspace names the workspace in which relative Sources lie, or "".
	Workspace string
	// Timeout is how long the command may execute, from its start; zero is without end. What comes
	// before and after does not count.
	Timeout time.Duration
	// Grace is how long the run may take to end after it was told to. Zero kills at once.
	Grace time.Duration
}

// An Input is a file or a directory that may be read and never written.
type Input struct {
	Target string
	// Content names the bytes, by digest or as "host", in the Spec's text.
	Content string
	Source  string // a path of this host, or, relative, of the workspace
	// Image, if not "", names the Mount that Source is relative to instead, "." being its root.
	Image string
}

// An Output is a directory that may be written.
type Output struct {
	Target string
	Source string // a directory of the workspace; relative
}

// A Temp is a private, empty, memory-backed directory of at most Bytes bytes.
type Temp struct {
	Target string
	Bytes  int64
}

// Validate returns ErrSpec for a Spec that contradicts itself: a relative, unclean or missing path, a
// target named twice, an environment that is not sorted or names a variable twice, an output that is
// not in the workspace, an input that would be writable through an output's Source, a limit that is not
// set, or an endpoint that cannot be one.
func (s *Spec) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrSpec, fmt.Sprintf(format, args...))
	}
	if len(s.Args) == 0 || s.Args[0] == "" {
		return bad("no program to run")
	}
	for _, a := range slices.Concat(s.Args, s.Env) {
		if strings.ContainsRune(a, 0) || !utf8.ValidString(a) {
			return bad("%q is not UTF-8 text without NUL", a)
		}
	}
	keys := make([]string, len(s.Env))
	for i, kv := range s.Env {
		k, _, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return bad("environment entry %q is not KEY=VALUE", kv)
		}
		keys[i] = k
	}
	if !slices.IsSorted(keys) || len(slices.Compact(slices.Clone(keys))) != len(keys) {
		return bad("environment is not sorted by key with each key once")
	}
	targets := map[string]bool{}
	target := func(kind, t string) error {
		if !path.IsAbs(t) || path.Clean(t) != t || t == "/" || strings.ContainsRune(t, 0) {
			return bad("%s target %q is not a clean absolute path below the root", kind, t)
		}
		if targets[t] {
			return bad("target %q is named twice", t)
		}
		targets[t] = true
		return nil
	}
	for _, o := range s.Outputs {
		if err := target("output", o.Target); err != nil {
			return err
		}
		if s.Workspace == "" || !local(o.Source) {
			return bad("output %s has the source %q, which is not inside the workspace", o.Target, o.Source)
		}
	}
	for _, in := range s.Inputs {
		if err := target("input", in.Target); err != nil {
			return err
		}
		if in.Image != "" {
			if in.Source != "." && !local(in.Source) {
				return bad("input %s has the source %q, which is not inside an image", in.Target, in.Source)
			}
			continue
		}
		if path.IsAbs(in.Source) {
			continue
		}
		if s.Workspace == "" || !local(in.Source) {
			return bad("input %s has the source %q, which is neither a path of the host nor inside the workspace", in.Target, in.Source)
		}
		for _, o := range s.Outputs {
			if within(in.Source, o.Source) || within(o.Source, in.Source) {
				return bad("input %s and output %s share %q: an input must not be writable", in.Target, o.Target, in.Source)
			}
		}
	}
	for _, t := range s.Temp {
		if err := target("temp", t.Target); err != nil {
			return err
		}
		if t.Bytes <= 0 {
			return bad("temp %s has no size", t.Target)
		}
	}
	if !path.IsAbs(s.Dir) || path.Clean(s.Dir) != s.Dir {
		return bad("working directory %q is not a clean absolute path", s.Dir)
	}
	if err := s.Network.validate(); err != nil {
		return bad("%v", err)
	}
	if err := s.Limits.validate(); err != nil {
		return bad("%v", err)
	}
	if err := s.Conditions.validate(); err != nil {
		return bad("conditions: %v", err)
	}
	if !s.Audit.known() {
		return bad("audit %q is none of %q, %q and %q", s.Audit, AuditViolations, AuditFull, AuditOff)
	}
	return nil
}

// local reports whether p is a clean relative path that stays inside its root and is not the root.
func local(p string) bool {
	return p != "" && p != "." && !path.IsAbs(p) && path.Clean(p) == p && p != ".." && !strings.HasPrefix(p, "../")
}

// within reports whether a is b or lies below it.
func within(a, b string) bool { return a == b || strings.HasPrefix(a, b+"/") }
