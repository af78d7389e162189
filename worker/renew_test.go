// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A marking store counts how often each blob is marked as used.
type marking struct {
	*castest.Memory
	mu    sync.Mutex
	marks map[cas.Digest]int // guarded by mu
	hook  func()             // called by Missing, if not nil
}

func (m *marking) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	m.mu.Lock()
	for _, d := range ds {
		m.marks[d]++
	}
	m.mu.Unlock()
	if m.hook != nil {
		m.hook()
	}
	return m.Memory.Missing(ctx, ds)
}

// taken returns the marks since the last call.
func (m *marking) taken() map[cas.Digest]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	taken := maps.Clone(m.marks)
	clear(m.marks)
	return taken
}

// newMarkingBench returns a bench with a marking store.
func newMarkingBench(t *testing.T, run runFunc) (*bench, *marking, *strings.Builder) {
	b := newBench(t, run)
	m := &marking{Memory: b.store, marks: map[cas.Digest]int{}}
	b.cfg.Instances = func(string) (*cas.Instance, error) { return &cas.Instance{Store: m, Actions: m}, nil }
	var log strings.Builder
	b.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	return b, m, &log
}

func TestRule024_InputsOfARunningActionAreRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m *marking
		var inputs []cas.Digest
		b, m, log := newMarkingBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
			m.taken()
			for hour := range 3 {
				time.Sleep(time.Hour)
				synctest.Wait()
				got := m.taken()
				for _, d := range inputs {
					expect.Equal(t, got[d], 1, "hour %d: %s was marked N times", hour, d)
				}
			}
			return &sandbox.Result{}
		})
		action := b.action(nil)
		inputs = b.store.Digests() // an action, a command, two Directories, a file
		must.Be(t, len(inputs) == 5, "got %d blobs, want 5", len(inputs))
		b.do(&Task{Action: action})
		m.taken()
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		if got := m.taken(); len(got) > 0 || log.Len() > 0 {
			t.Errorf("after the action: got %d marks, log %s, want none", len(got), log)
		}
	})
}

// A run does not fail because an input is lost, but the loss is logged.
func TestInputLostDuringRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := cas.SHA256.Sum([]byte("12345"))
		var b *bench
		b, m, log := newMarkingBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
			b.store.Delete(lost)
			time.Sleep(90 * time.Minute)
			return &sandbox.Result{}
		})
		action := b.action(nil)
		if out := b.do(&Task{Action: action}); out.Result.ExitCode != 0 || !b.recorded(action) {
			t.Errorf("got %v", out)
		}
		if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, lost.String()) || !strings.Contains(text, action.String()) {
			t.Errorf("got log %q, want a line with %s and %s", text, lost, action)
		}
		expect.That(t, m.taken()[lost] != 0, "the lost blob was not marked")
	})
}

func TestRule072_AllLostInputsAreListed(t *testing.T) {
	b := newBench(t, ended(0))
	command := b.put(&repb.Command{Arguments: []string{"cc", "-c"}, OutputPaths: []string{"o/x"}})
	action := b.action(nil)
	d := must.Get(cas.FromProto(cas.SHA256, command))(t)
	lost := []cas.Digest{d, cas.SHA256.Sum([]byte("12345"))}
	for _, d := range lost {
		b.store.Delete(d)
	}
	_, err := b.Execute(t.Context(), &Task{Action: action}, func(Stage) {})
	var f *Fault
	expect.That(t, errors.As(err, &f) && f.Kind == FaultMissing && slices.Equal(f.Blobs, lost),
		"got %v, want a fault of kind Missing with %v", err, lost)
}

// RenewInputs works on one action at a time, does not wait if its action is over, and survives a panic of the store.
func TestRenewInputsIsSequential(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, m, log := newMarkingBench(t, ended(0))
		task := &Task{Action: b.action(nil)}
		working, most := 0, 0
		m.hook = func() {
			working++
			most = max(most, working)
			time.Sleep(time.Minute)
			working--
		}
		var wg sync.WaitGroup
		began := time.Now()
		for range 5 {
			wg.Go(func() { b.RenewInputs(t.Context(), task) })
		}
		synctest.Wait()
		over, cancel := context.WithCancel(t.Context())
		cancel()
		b.RenewInputs(over, task)
		expect.Equal(t, time.Since(began), 0)
		wg.Wait()
		expect.That(t, most == 1 && log.Len() <= 0, "got %d concurrent calls, log %q", most, log)

		m.hook = func() { panic("a defect") }
		b.RenewInputs(t.Context(), task)
		m.hook = nil
		b.RenewInputs(t.Context(), task) // is not blocked
		if text := log.String(); strings.Count(text, "a defect") == 0 || !strings.Contains(text, "RenewInputs") {
			t.Errorf("got log %q, want the panic and its stack", text)
		}
	})
}

// All blobs of a result and its audit log are marked as used, even if the result is not cached.
func TestRule063_ResultBlobsAreMarked(t *testing.T) {
	for name, exit := range map[string]int{"recorded": 0, "failed": 1} {
		t.Run(name, func(t *testing.T) {
			b, m, _ := newMarkingBench(t, nil)
			b.backend.run = func(_ context.Context, _ *sandbox.Spec, std sandbox.Stdio, out *os.Root) *sandbox.Result {
				std.Stdout.Write([]byte("said"))
				std.Stderr.Write([]byte("complained"))
				for name, content := range map[string]string{"o/x": "output", "o/t/f": "in the Tree", "o/t/d/f": "in a child"} {
					expect.Error(t, out.MkdirAll(name[:strings.LastIndex(name, "/")], 0o755), nil)
					expect.Error(t, out.WriteFile(name, []byte(content), 0o644), nil)
				}
				m.taken()
				return &sandbox.Result{ExitCode: exit, Events: []sandbox.Event{connect}}
			}
			action := b.action(func(_ *repb.Action, c *repb.Command) { c.OutputPaths = append(c.OutputPaths, "o/t") })
			out := b.do(&Task{Action: action})
			expect.Equal(t, b.recorded(action), exit == 0)
			got := m.taken()
			want := []cas.Digest{out.AuditLog}
			for _, content := range []string{"said", "complained", "output", "in the Tree", "in a child"} {
				want = append(want, cas.SHA256.Sum([]byte(content)))
			}
			tree := must.Get(cas.FromProto(cas.SHA256, out.Result.OutputDirectories[0].TreeDigest))(t)
			for _, d := range append(want, tree) {
				expect.That(t, got[d] != 0, "%s was not marked", d)
			}
		})
	}
}
