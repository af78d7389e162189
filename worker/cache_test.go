// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

// A tally counts calls of a store.
type tally struct {
	*castest.Memory
	mu     sync.Mutex
	opened map[cas.Digest]int // guarded by mu
	puts   int                // guarded by mu
	packs  []int              // guarded by mu; number of blobs in each PutAll
	asked  int                // guarded by mu; calls of Missing
}

func (s *tally) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	s.mu.Lock()
	s.opened[d]++
	s.mu.Unlock()
	return s.Memory.Open(ctx, d, off)
}

func (s *tally) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	s.mu.Lock()
	s.puts++
	s.mu.Unlock()
	return s.Memory.Put(ctx, d, r)
}

func (s *tally) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	s.mu.Lock()
	s.packs = append(s.packs, len(blobs))
	s.mu.Unlock()
	return s.Memory.PutAll(ctx, blobs)
}

func (s *tally) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.mu.Lock()
	s.asked++
	s.mu.Unlock()
	return s.Memory.Missing(ctx, ds)
}

func newTallyBench(t *testing.T, run runFunc) (*bench, *tally) {
	b := newBench(t, run)
	s := &tally{Memory: b.store, opened: map[cas.Digest]int{}}
	b.cfg.Instances = func(string) (*cas.Instance, error) { return &cas.Instance{Store: s, Actions: s}, nil }
	return b, s
}

// Admission and execution read each message, and look for missing files, only once.
func TestEachMessageIsReadOnce(t *testing.T) {
	b, s := newTallyBench(t, ended(0))
	action := b.action(nil)
	messages := slices.DeleteFunc(b.store.Digests(), func(d cas.Digest) bool { return d == cas.SHA256.Sum([]byte("12345")) })
	in := must.Get(b.cfg.Instances(""))(t)
	if _, err := b.Action(t.Context(), in, action); err != nil { // like the lookup in the action cache
		t.Fatal(err)
	}
	must.Get(b.Admit(t.Context(), &Task{Action: action}))(t)
	b.do(&Task{Action: action})
	want := map[cas.Digest]int{}
	for _, d := range messages {
		want[d] = 1
	}
	got := maps.Clone(s.opened)
	delete(got, cas.SHA256.Sum([]byte("12345"))) // read by stage
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b cas.Digest) bool { return a == b })); len(want) != 4 || d != "" {
		t.Errorf("messages read (-want +got):\n%s", d)
	}
	expect.Equal(t, s.asked, 1, "calls of Missing (1: there are no outputs)")
}

// A Task.ActionBlob is not read again, and is refused if it is not the action.
func TestActionBlobIsNotRead(t *testing.T) {
	b, s := newTallyBench(t, ended(0))
	action := b.action(nil)
	known := must.Get(cas.ReadAll(t.Context(), b.store, action, cas.MaxMessage))(t)
	b.do(&Task{Action: action, ActionBlob: known})
	expect.Equal(t, s.opened[action], 0, "reads of the action")
	another := b.action(command(func(c *repb.Command) { c.Arguments = append(c.Arguments, "another") }))
	_, err := b.Execute(t.Context(), &Task{Action: another, ActionBlob: known}, func(Stage) {})
	if f, ok := errors.AsType[*Fault](err); !ok || f.Kind != FaultInvalid || !strings.Contains(f.Error(), another.String()) {
		t.Errorf("blob of another action: got %v, want a fault of kind Invalid", err)
	}
}

// Small blobs are stored with one call.
func TestOutputsAreBatched(t *testing.T) {
	b, s := newTallyBench(t, func(_ context.Context, _ *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
		std.Stdout.Write([]byte("said"))
		for name, content := range map[string]string{"o/x": "output", "o/empty": "", "t/a": "a", "t/b/c": "c", "big": strings.Repeat("big", 100_000)} {
			if i := strings.LastIndex(name, "/"); i > 0 {
				expect.Error(t, out.MkdirAll(name[:i], 0o755), nil)
			}
			expect.Error(t, out.WriteFile(name, []byte(content), 0o644), nil)
		}
		return &sandbox.Result{}
	})
	action := b.action(func(_ *repb.Action, c *repb.Command) { c.OutputPaths = []string{"o/x", "o/empty", "t", "big"} })
	out := b.do(&Task{Action: action})
	// stdout, o/x, t/a, t/b/c, the Tree and the manifest; big on its own.
	expect.That(t, slices.Equal(s.packs, []int{6}) && s.puts == 1,
		"got batches of %v and %d single blobs, want one batch of 6 and 1", s.packs, s.puts)
	ds := must.Get(cas.Closure(t.Context(), s, cas.SHA256, out.Result))(t)
	if missing, err := s.Memory.Missing(t.Context(), ds); err != nil || len(missing) > 0 || len(ds) != 7 {
		t.Errorf("got %d blobs, %d missing, %v, want 7 blobs", len(ds), len(missing), err)
	}
}

// Staging notices lost inputs. From then on, all lost inputs are reported until they are back.
func TestInputsLostAfterAdmission(t *testing.T) {
	b := newBench(t, ended(0))
	first := cas.SHA256.Sum([]byte("12345"))
	second := must.Get(cas.PutBytes(t.Context(), b.store, cas.SHA256, []byte("second")))(t)
	root := b.put(&repb.Directory{Files: []*repb.FileNode{{Name: "a", Digest: first.Proto()}, {Name: "b", Digest: second.Proto()}}})
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = root })
	admit := func() error {
		_, err := b.Admit(t.Context(), &Task{Action: action})
		return err
	}
	must.Succeed(t, admit())
	lost := []cas.Digest{first, second}
	for _, d := range lost {
		b.store.Delete(d)
	}
	var f *Fault
	_, err := b.Execute(t.Context(), &Task{Action: action}, func(Stage) {})
	if !errors.As(err, &f) || f.Kind != FaultMissing || len(f.Blobs) == 0 || !slices.Contains(lost, f.Blobs[0]) {
		t.Errorf("got %v, want a fault of kind Missing with an input", err)
	}
	if err := admit(); !errors.As(err, &f) || f.Kind != FaultMissing || !slices.Equal(f.Blobs, lost) {
		t.Errorf("got %v, want %v missing", err, lost)
	}
	for _, content := range []string{"12345", "second"} {
		must.Get(cas.PutBytes(t.Context(), b.store, cas.SHA256, []byte(content)))(t)
	}
	must.Succeed(t, admit())
	expect.Equal(t, b.do(&Task{Action: action}).Result.ExitCode, 0, "exit code")
}

func TestInstancesAreSeparate(t *testing.T) {
	b := newBench(t, ended(0))
	action := b.action(nil)
	b.cfg.Instances = func(name string) (*cas.Instance, error) {
		if name == "own" {
			return &cas.Instance{Name: name, Store: b.store, Actions: b.store}, nil
		}
		m := castest.NewMemory()
		return &cas.Instance{Name: name, Store: m, Actions: m}, nil
	}
	must.Get(b.Admit(t.Context(), &Task{Action: action, Instance: "own"}))(t)
	var f *Fault
	_, err := b.Admit(t.Context(), &Task{Action: action, Instance: "other"})
	expect.That(t, errors.As(err, &f) && f.Kind == FaultMissing && slices.Equal(f.Blobs, []cas.Digest{action}),
		"got %v, want a missing action", err)
}

// Missing or damaged blobs do not prevent the others from being marked.
func TestRule024_RenewInputsMarksAllInputs(t *testing.T) {
	b, m, log := newMarkingBench(t, ended(0))
	b.Local.inputs = newLocal(Config{RenewInterval: time.Nanosecond}).inputs // a cache that expires at once
	text := func(content string) *repb.Digest {
		d := must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(content)))(t)
		return d.Proto()
	}
	dir := func(name string, content *repb.Digest) *repb.Directory {
		return &repb.Directory{Files: []*repb.FileNode{{Name: name, Digest: content}}}
	}
	c, d, e := text("c"), text("d"), text("e")
	left, right := b.put(dir("c", c)), b.put(dir("d", d))
	top := dir("e", e)
	top.Directories = []*repb.DirectoryNode{{Name: "l", Digest: left}, {Name: "m", Digest: right}, {Name: "r", Digest: left}}
	root := b.put(top)
	action := b.action(func(a *repb.Action, _ *repb.Command) { a.InputRootDigest = root })
	command := b.put(&repb.Command{Arguments: []string{"cc", "-c"}, OutputPaths: []string{"o/x"}})

	digest := func(p *repb.Digest) cas.Digest {
		return must.Get(cas.FromProto(cas.SHA256, p))(t)
	}
	renewed := func(logged string, want ...*repb.Digest) {
		t.Helper()
		log.Reset()
		m.taken()
		b.RenewInputs(t.Context(), &Task{Action: action})
		got := m.taken()
		for _, p := range append(want, action.Proto(), command) {
			expect.That(t, got[digest(p)] != 0, "%s was not marked", p.Hash)
		}
		if !strings.Contains(log.String(), logged) || logged == "" && log.Len() > 0 {
			t.Errorf("got log %q, want %q", log, logged)
		}
	}
	renewed("", c, d, e) // reads what is not a file
	renewed("", c, d, e) // from the cache
	m.Delete(digest(command))
	m.Delete(digest(d))
	renewed("blobs=2 first="+digest(command).String(), root, left, right, c, d, e)
	b.Local.inputs = newLocal(Config{CacheBytes: 1}).inputs // a cache that keeps nothing
	m.Delete(digest(left))
	renewed("blobs=3", e)
	b.put(&repb.Command{Arguments: []string{"cc", "-c"}, OutputPaths: []string{"o/x"}})
	m.Corrupt(digest(right))
	renewed("corrupt", e)
	m.Delete(action)
	log.Reset()
	b.RenewInputs(t.Context(), &Task{Action: action})
	expect.Text(t, log.String(), fmt.Sprint("first=", action))
}
