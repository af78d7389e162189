// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A Spec is everything that one run may see and use. It is plain data; its zero value permits nothing.
//
// Every path inside the run is absolute, clean and called Target. A Source is where bytes come from on this host. It is
// not part of the Spec's text, so hosts that run the same thing have the same text.
type Spec struct {
	Args []string // program and arguments, at least the program
	Dir  string   // the working directory, inside a Target
	Env  []string // the whole environment, "KEY=VALUE", sorted by key, each key once

	// Root, if not nil, is the root file system. Nil is an empty one.
	Root *Root
	// Superuser makes the command user and group 0 in its user namespace, without capabilities or any right that the
	// default user lacks.
	Superuser bool
	// Inputs are readable (set I). A later input may lie inside an earlier one.
	Inputs []Input
	// Outputs are writable directories that outlive the run (set O).
	Outputs []Output
	// Lower are the lower layers of outputs, the topmost first.
	Lower []Lower
	// Owned are paths of the workspace, at or below the Source of an output, that the Backend gives to the run's user.
	// Files below such a path keep their owner.
	Owned []string
	// Temp are private writable directories that are discarded (set T).
	Temp []Temp
	// Sockets are Unix sockets outside the run that it may connect to. The Target is in an output or a temporary
	// directory, the Source a listening socket in the workspace, to which the run's user may write; Image is "".
	Sockets []Input
	// Network is what the run may reach (set N).
	Network Network
	// Limits bound what the run may use. Each must be set.
	Limits Limits
	// Audit is how closely the run is monitored. The zero value records violations.
	Audit Audit
	// Kill are the kinds of events that end the run: it is killed at the first, if the Backend notices it during the run.
	// The call that makes the attempt never returns. An EventExec is known only at the end, because searching PATH tries
	// many programs, and so may be an EventLimit.
	Kill []EventKind
	// Conditions change what the run can observe. The zero value changes nothing.
	Conditions Conditions

	// Accept is the backend (Features.Backend) that may run the Spec in spite of its Features.Gaps, or "".
	Accept string
	// Workspace names the workspace that relative Sources refer to, or "".
	Workspace string
	// Timeout is how long the command may execute, without setup and teardown; zero is unlimited.
	Timeout time.Duration
	// Grace is the time between SIGTERM and SIGKILL. Zero kills at once.
	Grace time.Duration
}

// A Root is a read-only directory that becomes the root of the file system. Inputs, outputs and temporary directories
// are mounted over it, and so are /dev and /proc: it contains a file or directory for each of these, since nothing can
// be created in it. If it has a file /etc/hosts, the run sees its own there.
type Root struct {
	// Content identifies the files in the Spec's text.
	Content string
	// Image names a Mount, or a Workspace that outlives the run and that nobody changes any more.
	Image string
	// Source is relative to Image; "." is its root.
	Source string
}

// An Input is a read-only file or directory.
type Input struct {
	Target string
	// Content identifies the bytes in the Spec's text: a digest, "host", or "volume" for files of this host that may
	// change during the run.
	Content string
	// Source is a path on this host or, if relative, in the workspace. A Backend refuses a path that contains a
	// symbolic link; ForBuild and ForTest resolve it.
	Source string
	// Image, if not "", names the Mount that Source is relative to; "." is its root.
	Image string
}

// An Output is a writable directory.
type Output struct {
	// Target is the path of the directory. If it is "/", the output is the root file system: what it and its lower layers
	// lack does not exist, and they contain what a Root contains.
	Target string
	// Source is a directory of the workspace, relative. If it does not exist, the Backend creates it, writable for the
	// run. If it exists and is not writable, each attempt to create a file in it is an EventWrite with this reason.
	Source string
}

// A Lower is a lower layer of an output (overlayfs). The output's Source is the upper layer: new entries and all
// changes are made there. Directories of the same path are merged; any other entry hides those of its path in lower
// layers. Nothing in a Lower can be changed, replaced, removed or linked in these two cases:
//
//   - Runs have another user than the worker, everything in the Lower belongs to the worker, its files are not writable
//     for others, and its directories have the mode 1777. Then every directory accepts new entries.
//   - Features.SameUser is set. Then everything in the Lower belongs to nobody inside the run, and a directory accepts
//     new entries if it also exists in the Source.
type Lower struct {
	Target  string // of an Output
	Content string // identifies the entries in the Spec's text
	Source  string // relative to the workspace or to the root of the image, of which "." is the root
	Image   string // the name of the Mount that has the Source, or ""
}

// A Temp is a private, empty, memory-backed directory of at most Bytes bytes.
type Temp struct {
	Target string
	Bytes  int64
}

// Validate returns ErrSpec for a nil or contradictory Spec: a relative, unclean or missing path, a duplicate target, an
// environment that is not sorted and unique, an output outside the workspace, an input that an output makes writable, a
// lower directory without an output, a limit that is not set, or an invalid endpoint or condition.
func (s *Spec) Validate() error {
	if err := s.validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrSpec, err)
	}
	return nil
}

var errNilSpec = errors.New("the Spec is nil")

func (s *Spec) validate() error {
	if s == nil {
		return errNilSpec
	}
	if err := s.validateCommand(); err != nil {
		return err
	}
	if err := s.validatePaths(); err != nil {
		return err
	}
	if err := s.Network.validate(); err != nil {
		return err
	}
	if err := s.Limits.validate(); err != nil {
		return err
	}
	if err := s.Conditions.validate(); err != nil {
		return fmt.Errorf("conditions: %w", err)
	}
	if s.Superuser && s.Conditions.UID != 0 {
		return errors.New("Superuser means user 0: the conditions must not set another user")
	}
	if !s.Audit.known() {
		return fmt.Errorf("audit %q is none of %q, %q and %q", string(s.Audit), string(AuditViolations), string(AuditFull), string(AuditOff))
	}
	for _, k := range s.Kill {
		if !slices.Contains(violations, k) {
			return fmt.Errorf("events of kind %q are not violations and cannot end the run", string(k))
		}
		if k != EventLimit && s.Audit == AuditOff {
			return fmt.Errorf("events of kind %q end the run, but the audit level %s records none", string(k), s.Audit)
		}
	}
	return nil
}

func (s *Spec) validateCommand() error {
	if len(s.Args) == 0 || s.Args[0] == "" {
		return errors.New("no program to run")
	}
	for _, a := range slices.Concat(s.Args, s.Env) {
		if strings.ContainsRune(a, 0) || !utf8.ValidString(a) {
			return fmt.Errorf("%q is not UTF-8 text without NUL", a)
		}
	}
	last := ""
	for _, kv := range s.Env {
		k, _, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return fmt.Errorf("environment entry %q is not KEY=VALUE", kv)
		}
		if k <= last {
			return fmt.Errorf("environment is not sorted by unique keys: %q follows %q", k, last)
		}
		last = k
	}
	if !path.IsAbs(s.Dir) || path.Clean(s.Dir) != s.Dir {
		return fmt.Errorf("working directory %q is not a clean absolute path", s.Dir)
	}
	return nil
}

func (s *Spec) validatePaths() error {
	targets := map[string]bool{}
	target := func(kind, t string) error {
		if !path.IsAbs(t) || path.Clean(t) != t || t == "/" && kind != "output" || strings.ContainsRune(t, 0) {
			return fmt.Errorf("%s target %q is not a clean absolute path below the root", kind, t)
		}
		if targets[t] {
			return fmt.Errorf("duplicate target %q", t)
		}
		targets[t] = true
		return nil
	}
	if r := s.Root; r != nil && (r.Image == "" || r.Source != "." && !local(r.Source)) {
		return fmt.Errorf("source %q of the root is not inside an image", r.Source)
	}
	for _, o := range s.Outputs {
		if err := target("output", o.Target); err != nil {
			return err
		}
		if o.Target == "/" && s.Root != nil {
			return errors.New("both an output at / and a root file system: set only one of them")
		}
		if s.Workspace == "" {
			return fmt.Errorf("output %s needs a workspace: set Workspace to the name of one that Backend.Workspace returns", o.Target)
		}
		if !local(o.Source) {
			return fmt.Errorf("source %q of output %s is not inside the workspace", o.Source, o.Target)
		}
	}
	for _, l := range s.Lower {
		if err := s.validateLower(&l); err != nil {
			return err
		}
	}
	for _, p := range s.Owned {
		if !local(p) || !slices.ContainsFunc(s.Outputs, func(o Output) bool { return within(p, o.Source) }) {
			return fmt.Errorf("owned path %q is not in an output", p)
		}
	}
	for _, in := range s.Inputs {
		if err := target("input", in.Target); err != nil {
			return err
		}
		if err := s.validateSource(&in); err != nil {
			return err
		}
	}
	for _, t := range s.Temp {
		if err := target("temp", t.Target); err != nil {
			return err
		}
		if t.Bytes <= 0 {
			return fmt.Errorf("temp %s has no size", t.Target)
		}
	}
	for _, in := range s.Sockets {
		if err := target("socket", in.Target); err != nil {
			return err
		}
		if err := s.validateSocket(&in); err != nil {
			return err
		}
	}
	return nil
}

func (s *Spec) validateSocket(in *Input) error {
	var writable []string
	for _, o := range s.Outputs {
		writable = append(writable, strings.TrimSuffix(o.Target, "/"))
	}
	for _, t := range s.Temp {
		writable = append(writable, t.Target)
	}
	switch {
	case !slices.ContainsFunc(writable, func(dir string) bool { return within(in.Target, dir) }):
		return fmt.Errorf("socket %s is in no output and no temporary directory", in.Target)
	case in.Image != "" || path.IsAbs(in.Source):
		return fmt.Errorf("source %q of socket %s is not inside the workspace", in.Source, in.Target)
	}
	return s.validateSource(in)
}

func (s *Spec) validateSource(in *Input) error {
	switch {
	case in.Image != "":
		if in.Source != "." && !local(in.Source) {
			return fmt.Errorf("source %q of input %s is not inside an image", in.Source, in.Target)
		}
		return nil
	case path.IsAbs(in.Source), filepath.IsAbs(in.Source): // on Windows with a drive
		return nil
	case s.Workspace == "" || !local(in.Source):
		return fmt.Errorf("source %q of input %s is neither a path of the host nor inside the workspace", in.Source, in.Target)
	}
	for _, o := range s.Outputs {
		if within(in.Source, o.Source) || within(o.Source, in.Source) {
			return fmt.Errorf("input %s and output %s share %q: inputs must not be writable", in.Target, o.Target, in.Source)
		}
	}
	return nil
}

func (s *Spec) validateLower(l *Lower) error {
	i := slices.IndexFunc(s.Outputs, func(o Output) bool { return o.Target == l.Target })
	switch {
	case i < 0:
		return fmt.Errorf("lower directory %q has the target %q, which is not an output", l.Source, l.Target)
	case !local(l.Source) && (l.Image == "" || l.Source != "."):
		return fmt.Errorf("lower directory %q of %s is not inside the workspace or an image", l.Source, l.Target)
	case l.Image != "":
		return nil
	}
	for _, o := range s.Outputs {
		if within(l.Source, o.Source) || within(o.Source, l.Source) {
			return fmt.Errorf("output %s and a lower directory share %q: inputs must not be writable", o.Target, l.Source)
		}
	}
	return nil
}

// local reports whether p is a clean relative path below its root.
func local(p string) bool {
	return p != "" && p != "." && !path.IsAbs(p) && path.Clean(p) == p && p != ".." && !strings.HasPrefix(p, "../")
}

// within reports whether a is b or lies below it.
func within(a, b string) bool { return a == b || strings.HasPrefix(a, b+"/") }
