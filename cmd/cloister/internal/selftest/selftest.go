// SPDX-License-Identifier: Apache-2.0

// Package selftest proves that the sandbox keeps its promises on this machine, by running a program that tries to break
// them.
package selftest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// A selftest runs a program that attempts what the sandbox must deny, twice, and checks that the sandbox keeps its
// guarantees. The program is this one, as an input (Command).
type selftest struct {
	out    io.Writer
	failed bool

	heard    string // what connected to the listener of this host
	attempts []sandbox.Event
	input    cas.Digest // what the program tries to write to
}

// report prints a line in the format of check.
func (s *selftest) report(ok bool, what, format string, args ...any) {
	mark := "ok  "
	if !ok {
		mark, s.failed = "FAIL", true
	}
	fmt.Fprintf(s.out, "%s  %-24s %s\n", mark, what, fmt.Sprintf(format, args...))
}

// Run makes the runs and reports on each guarantee. It fails with exit code 1 if one is broken, and with 3 if the test
// cannot be made. change, if not nil, modifies the worker before it starts.
func Run(ctx context.Context, box *confinement.Flags, out io.Writer, change func(*localworker.Worker)) (err error) {
	defer func() {
		var exitErr *exit.Error
		if err != nil && !errors.As(err, &exitErr) {
			err = exit.New(exit.Environment, fmt.Errorf("cannot run the self-test: %w", err))
		}
	}()
	before, err := takeCensus()
	if err != nil {
		return err
	}
	s := &selftest{out: out}
	err = s.runs(ctx, box, change)
	left := before.compare() // always: it also cleans up
	if err != nil {
		return err
	}
	for _, l := range left {
		s.report(l.ok, l.what, "%s", l.detail)
	}
	if s.failed {
		return exit.New(exit.No, errors.New("the sandbox breaks its guarantees on this machine"))
	}
	return nil
}

// runs makes two runs with a Worker, and closes it.
func (s *selftest) runs(ctx context.Context, box *confinement.Flags, change func(*localworker.Worker)) (err error) {
	w, err := localworker.Open(box)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		if c, err := listener.Accept(); err == nil {
			s.heard = c.RemoteAddr().String()
			c.Close()
		}
	}()
	end := func() { listener.Close(); <-accepting }
	defer end()

	in, err := w.Store.Instance("")
	if err != nil {
		return err
	}
	action, err := s.put(ctx, in.Store, listener.Addr().String())
	if err != nil {
		return err
	}
	if change != nil {
		change(w)
	}
	if err := w.Start(ctx, worker.Config{Name: "selftest", Grace: time.Second, Audit: func(_ *worker.Task, a *worker.Violations) {
		s.attempts = append(s.attempts, a.Events...)
	}}); err != nil {
		return err
	}
	var outcomes [2]*worker.Outcome
	for i := range outcomes {
		t := &worker.Task{Action: action, SkipCacheLookup: true, Queued: time.Now()}
		if outcomes[i], err = w.Local.Execute(ctx, t, func(worker.Stage) {}); err != nil {
			return err
		}
	}
	end()
	return s.check(ctx, in.Store, outcomes)
}

// selfInput is large enough to be mounted from the store, where that is supported.
var selfInput = bytes.Repeat([]byte("input of the self-test\n"), 10_000)

// put puts the action: this program, and a file that it tries to modify.
func (s *selftest) put(ctx context.Context, store cas.Store, address string) (cas.Digest, error) {
	path, err := os.Executable()
	if err != nil {
		return cas.Digest{}, err
	}
	self, err := os.Open(path)
	if err != nil {
		return cas.Digest{}, err
	}
	defer self.Close()
	program, err := cas.PutSeeker(ctx, store, cas.SHA256, self)
	if err != nil {
		return cas.Digest{}, err
	}
	if s.input, err = cas.PutBytes(ctx, store, cas.SHA256, selfInput); err != nil {
		return cas.Digest{}, err
	}
	root, err := cas.PutProto(ctx, store, cas.SHA256, &repb.Directory{Files: []*repb.FileNode{
		{Name: "input", Digest: s.input.Proto()}, {Name: "program", Digest: program.Proto(), IsExecutable: true},
	}})
	if err != nil {
		return cas.Digest{}, err
	}
	r := localworker.ActionFlags{Args: []string{"./program", Command, address}, Out: []string{"result"}, Timeout: time.Minute}
	return r.PutAction(ctx, store, root)
}

// check reports what the two runs showed.
func (s *selftest) check(ctx context.Context, store cas.Store, outcomes [2]*worker.Outcome) error {
	var attempts []attempted
	for _, o := range outcomes {
		text := o.Result.StdoutRaw
		if d, err := cas.FromProto(cas.SHA256, o.Result.StdoutDigest); err == nil && len(text) == 0 {
			if text, err = cas.ReadAll(ctx, store, d, 1<<20); err != nil {
				return err
			}
		}
		var of []attempted
		if err := json.Unmarshal(text, &of); err != nil || o.Result.ExitCode != 0 {
			return fmt.Errorf("the program ended with exit code %d: %s", o.Result.ExitCode, o.Message)
		}
		attempts = append(attempts, of...)
	}
	// held reports whether all attempts of a kind were refused at once.
	held := func(kind string) (ok bool, detail string) {
		n := 0
		for _, a := range attempts {
			if a.Kind != kind {
				continue
			}
			if a.Error == "" || a.Late {
				return false, fmt.Sprintf("%s: %s", a.What, cmp.Or(a.Error, "it succeeded"))
			}
			n++
			detail = fmt.Sprintf("%s: %s (%d attempts, all refused)", a.What, a.Error, n)
		}
		return n > 0, detail
	}
	ok, detail := held("connect")
	if s.heard != "" {
		ok, detail = false, "this host was reached from "+s.heard
	}
	s.report(ok, "network off", "%s", detail)
	audited := slices.IndexFunc(s.attempts, func(e sandbox.Event) bool { return e.Kind == sandbox.EventConnect && e.Subject == "tcp "+nowhere })
	if audited >= 0 {
		s.report(true, "attempts audited", "%s", s.attempts[audited])
	} else {
		s.report(false, "attempts audited", "no event for a connection to %s", nowhere)
	}
	ok, detail = held("write")
	if b, err := cas.ReadAll(ctx, store, s.input, 1<<20); err != nil || !bytes.Equal(b, selfInput) {
		ok, detail = false, fmt.Sprintf("the blob was modified: %v", err)
	}
	s.report(ok, "inputs unwritable", "%s", detail)
	a, b := outcomes[0].StableHash, outcomes[1].StableHash
	if a == b && a != "" && len(outcomes[0].Result.OutputFiles) == 1 {
		s.report(true, "stable hash", "%s of two runs", a)
	} else {
		s.report(false, "stable hash", "two equal runs have %s and %s, and %d outputs", a, b, len(outcomes[0].Result.OutputFiles))
	}
	return nil
}

// A line is the result of a comparison.
type line struct {
	ok           bool
	what, detail string
}

// Command names the hidden command that makes the attempts inside a run.
const Command = "selftest-attempts"

// nowhere is a documentation address, which no host has (RFC 5737).
const nowhere = "192.0.2.1:80"

// An attempted is the result of an attempt.
type attempted struct {
	Kind, What string
	Error      string // "" if it succeeded
	Late       bool   // it timed out instead of being refused
}

// Attempts makes the attempts inside a run, and prints and stores their results.
func Attempts(ctx context.Context, address string, out io.Writer) error {
	all := append(connects(ctx, address, nowhere), writes("input")...)
	// Cut off port numbers and so on, so that both runs print the same.
	for i := range all {
		if at := strings.LastIndex(all[i].Error, ": "); at >= 0 {
			all[i].Error = all[i].Error[at+2:]
		}
	}
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	if err := os.WriteFile("result", b, 0o644); err != nil {
		return err
	}
	_, err = out.Write(b)
	return err
}

// connects tries to connect to addresses.
func connects(ctx context.Context, addresses ...string) []attempted {
	var all []attempted
	for _, a := range addresses {
		d := net.Dialer{Timeout: 3 * time.Second}
		c, err := d.DialContext(ctx, "tcp", a)
		var late net.Error
		got := attempted{Kind: "connect", What: "connect to tcp " + a, Late: errors.As(err, &late) && late.Timeout()}
		if err != nil {
			got.Error = err.Error()
		} else {
			c.Close()
		}
		all = append(all, got)
	}
	return all
}

// writes tries to modify a file.
func writes(name string) []attempted {
	var all []attempted
	for _, try := range []struct {
		what string
		do   func() error
	}{
		{"write to " + name, func() error {
			f, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteString("changed")
			return errors.Join(err, f.Close())
		}},
		{"change the mode of " + name, func() error { return os.Chmod(name, 0o777) }},
		{"rename " + name, func() error { return os.Rename(name, name+"2") }},
		{"remove " + name, func() error { return os.Remove(name) }},
	} {
		got := attempted{Kind: "write", What: try.what}
		if err := try.do(); err != nil {
			got.Error = err.Error()
		}
		all = append(all, got)
	}
	return all
}
