// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
)

var policies = map[string]overlay.Policy{"Through": overlay.WriteThrough, "Back": overlay.WriteBack}

// one returns instances that are all the same.
func one(s cas.Store, ac cas.ActionCache) cas.Instances {
	return func(name string) (*cas.Instance, error) { return &cas.Instance{Name: name, Store: s, Actions: ac}, nil }
}

// A pair is an overlay over two stores in memory with faults.
type pair struct {
	*overlay.Overlay
	near, far        *castest.Memory
	nearSide, faulty *castest.Faulty // over them
	store            cas.Store
	actions          cas.ActionCache
	journal          string
}

// newPair returns an overlay that is closed with the test.
func newPair(t *testing.T, policy overlay.Policy) *pair {
	t.Helper()
	p := &pair{near: castest.NewMemory(), far: castest.NewMemory(), journal: filepath.Join(t.TempDir(), "journal")}
	p.nearSide, p.faulty = castest.NewFaulty(p.near, p.near), castest.NewFaulty(p.far, p.far)
	p.Overlay = open(t, overlay.Config{Local: one(p.nearSide, p.nearSide), Upstream: one(p.faulty, p.faulty), Policy: policy, Journal: p.journal})
	in, err := p.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	p.store, p.actions = in.Store, in.Actions
	return p
}

func open(t *testing.T, c overlay.Config) *overlay.Overlay {
	t.Helper()
	o, err := overlay.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		o.Close(ctx)
	})
	return o
}

// drain closes p when all is far.
func (p *pair) drain(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // for ever, to those who will be done
	defer cancel()
	if err := p.Close(ctx); err != nil {
		t.Error(err)
	}
}

// put stores a blob in m.
func put(t *testing.T, m cas.Store, seed byte, size int) ([]byte, cas.Digest) {
	t.Helper()
	b, d := castest.Blob(seed, size)
	if err := m.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	return b, d
}

func has(t *testing.T, s cas.Store, d cas.Digest) bool {
	t.Helper()
	missing, err := s.Missing(t.Context(), []cas.Digest{d})
	if err != nil {
		t.Fatal(err)
	}
	return len(missing) == 0
}

func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

// TestContracts: an overlay is a store like any other, whatever it lies between.
func TestContracts(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return newPair(t, policy).store })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return newPair(t, policy).actions })
		})
	}
}

// TestContractsOfPlainStores: near and far need not be able to do more than a cas.Store can.
func TestContractsOfPlainStores(t *testing.T) {
	castest.TestStore(t, func(t *testing.T) cas.Store {
		near, far := struct{ cas.Store }{castest.NewMemory()}, struct{ cas.Store }{castest.NewMemory()}
		in, err := open(t, overlay.Config{Local: one(near, nil), Upstream: one(far, nil)}).Instance("")
		if err != nil {
			t.Fatal(err)
		}
		return in.Store
	})
}

// serve returns the address of a server on loopback over instances.
func serve(t *testing.T, instances cas.Instances) string {
	t.Helper()
	g := grpc.NewServer(casserver.ServerOptions(slog.New(slog.DiscardHandler))...)
	casserver.Register(g, casserver.Config{Instances: instances})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go g.Serve(l)
	t.Cleanup(g.Stop)
	return l.Addr().String()
}

// blobsOf returns a plain client of a server over instances.
func blobsOf(t *testing.T, instances cas.Instances) repb.ContentAddressableStorageClient {
	t.Helper()
	conn, err := grpc.NewClient(serve(t, instances), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return repb.NewContentAddressableStorageClient(conn)
}

// served returns a client, as it is used, of a server over instances.
func served(t *testing.T, instances cas.Instances) *remote.Client {
	t.Helper()
	c, err := remote.New("grpc://" + serve(t, instances))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// onDisk returns instances on a disk.
func onDisk(t *testing.T, dir string) cas.Instances {
	t.Helper()
	c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 256 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.Instance
}

// TestContractsOfDiskAndServer: as it is used.
func TestContractsOfDiskAndServer(t *testing.T) {
	for name, policy := range policies {
		instance := func(t *testing.T) *cas.Instance {
			in, err := open(t, overlay.Config{
				Local: onDisk(t, t.TempDir()), Upstream: served(t, castest.Instances()).Instance,
				Policy: policy, Journal: filepath.Join(t.TempDir(), "journal"),
			}).Instance("a/b")
			if err != nil {
				t.Fatal(err)
			}
			return in
		}
		t.Run(name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return instance(t).Store })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return instance(t).Actions })
			if _, ok := instance(t).Store.(cas.Filer); !ok {
				t.Error("over a disk it is no cas.Filer")
			}
			if _, ok := instance(t).Store.(cas.Locator); !ok {
				t.Error("over a disk it is no cas.Locator")
			}
			if _, ok := instance(t).Store.(cas.Splicer); !ok {
				t.Error("over a disk it is no cas.Splicer")
			}
		})
	}
}

func TestInstancesAreThoseBelow(t *testing.T) {
	near, far := castest.Instances(), castest.Instances()
	o := open(t, overlay.Config{Local: near, Upstream: far})
	a, err := o.Instance("a")
	if err != nil {
		t.Fatal(err)
	}
	_, d := put(t, a.Store, 1, 100)
	for name, want := range map[string]bool{"a": true, "b": false, "": false} {
		for _, instances := range []cas.Instances{near, far, o.Instance} {
			in, err := instances(name)
			if err != nil {
				t.Fatal(err)
			}
			if in.Name != name || has(t, in.Store, d) != want {
				t.Errorf("instance %q is %q and has the blob: %v, want %v", name, in.Name, !want, want)
			}
		}
	}
	if _, err := o.Instance("blobs"); !errors.Is(err, cas.ErrInvalid) {
		t.Errorf("an instance called blobs: got %v, want ErrInvalid", err)
	}
}

// TestFileComesNear: a run's large input may be far.
func TestFileComesNear(t *testing.T) {
	far := castest.NewMemory()
	in, err := open(t, overlay.Config{Local: onDisk(t, t.TempDir()), Upstream: one(far, far)}).Instance("")
	if err != nil {
		t.Fatal(err)
	}
	_, d := put(t, far, 1, 100_000)
	path, release, err := in.Store.(cas.Filer).File(t.Context(), d, true)
	if err != nil {
		t.Fatal(err)
	}
	if path == "" {
		t.Error("no path")
	}
	release()
}

// TestReadOnce: however many ask, far is asked once, and never again.
func TestReadOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		want, d := put(t, p.far, 1, 100_000)
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		for i := range 50 {
			group.Go(func() {
				if i%2 == 0 {
					if err := cas.Fetch(t.Context(), p.store, []cas.Digest{d}); err != nil {
						t.Error(err)
					}
				}
				got, err := cas.ReadAll(t.Context(), p.store, d, d.Size())
				if err != nil || !bytes.Equal(got, want) {
					t.Errorf("got %d bytes, %v", len(got), err)
				}
			})
		}
		synctest.Wait() // all have asked
		gate.Open()
		group.Wait()
		if n := p.faulty.Calls(castest.Open); n != 1 || !has(t, p.near, d) || p.Stats().Fetched != 1 {
			t.Errorf("far was asked %d times, %d were fetched", n, p.Stats().Fetched)
		}
	})
}

// TestAskerLeaves: one who gives up takes nothing from the others, nor from himself when he comes again.
func TestAskerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, d := put(t, p.far, 1, 1000)
		gate := p.faulty.Hold(castest.Open)
		ask := func(ctx context.Context) chan error {
			done := make(chan error, 1)
			go func() {
				_, err := cas.ReadAll(ctx, p.store, d, d.Size())
				done <- err
			}()
			synctest.Wait()
			return done
		}
		first, leave := context.WithCancel(t.Context())
		a, b := ask(first), ask(t.Context())
		leave()
		wantError(t, "the one who left", <-a, context.Canceled)
		gate.Open()
		if err := <-b; err != nil || p.faulty.Calls(castest.Open) != 1 {
			t.Errorf("the other: %v after %d calls", err, p.faulty.Calls(castest.Open))
		}

		p.near.Delete(d)
		p.faulty.Hold(castest.Open)
		gate = p.faulty.Hold(castest.Open)
		for range 3 {
			only, leave := context.WithCancel(t.Context())
			a = ask(only)
			leave()
			wantError(t, "the only one", <-a, context.Canceled)
		}
		gate.Open()
		synctest.Wait()
		if n := p.faulty.Calls(castest.Open); n != 2 || !has(t, p.near, d) {
			t.Errorf("near has it: %v, far was asked %d times, want once more", has(t, p.near, d), n)
		}
	})
}

// TestOrphansAreBounded: of many fetches that nobody waits for, some go on.
func TestOrphansAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		for range 2 { // what has ended counts no more
			gate := p.faulty.Hold(castest.Open)
			for _, n := range []int{8, 8, 20} { // one that is left twice counts once
				ctx, leave := context.WithCancel(t.Context())
				var group sync.WaitGroup
				for i := range n {
					_, d := put(t, p.far, byte(i), 1000)
					p.near.Delete(d)
					group.Go(func() {
						_, err := p.store.Open(ctx, d, 0)
						wantError(t, "one who left", err, context.Canceled)
					})
				}
				synctest.Wait()
				leave()
				group.Wait()
				synctest.Wait()
			}
			gate.Open()
			synctest.Wait()
			if n := p.near.Len(); n != 16 {
				t.Errorf("%d of 20 came near, want 16", n)
			}
		}
	})
}

// A stuck store is far, and copies many blobs only when it is let.
type stuck struct {
	cas.Store
	free chan struct{}
}

func (s *stuck) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) ([]cas.Digest, error) {
	<-s.free
	return nil, nil
}

// TestOneOfMany: who asks for one blob does not wait for those that another has asked for with it.
func TestOneOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := castest.NewMemory(), castest.NewMemory()
		faulty := castest.NewFaulty(far, nil)
		s := &stuck{faulty, make(chan struct{})}
		in, err := open(t, overlay.Config{Local: one(near, near), Upstream: one(s, nil)}).Instance("")
		if err != nil {
			t.Fatal(err)
		}
		_, a := put(t, far, 1, 100)
		_, b := put(t, far, 2, 100)
		var group sync.WaitGroup
		group.Go(func() {
			if err := cas.Fetch(t.Context(), in.Store, []cas.Digest{a, b}); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		gate := faulty.Hold(castest.Open)
		var askers sync.WaitGroup
		for range 5 {
			askers.Go(func() {
				if _, err := cas.ReadAll(t.Context(), in.Store, a, 100); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		gate.Open()
		askers.Wait()
		if n := faulty.Calls(castest.Open); n != 1 {
			t.Errorf("far was asked %d times, want once", n)
		}
		close(s.free)
		group.Wait()
	})
}

// TestJoinedFlightFails: who waits for a blob among others is not told of theirs.
func TestJoinedFlightFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, bad := put(t, p.far, 1, 100)
		want, good := put(t, p.far, 2, 100)
		p.far.Corrupt(bad)
		gate := p.faulty.Hold(castest.Open)
		var group sync.WaitGroup
		group.Go(func() {
			if err := cas.Fetch(t.Context(), p.store, []cas.Digest{bad, good}); err != nil {
				t.Errorf("both: %v", err)
			}
			_, err := p.store.Open(t.Context(), bad, 0)
			wantError(t, "the bad one", err, cas.ErrCorrupt)
			wantMissing(t, "after all", p.store, []cas.Digest{bad, good}, []cas.Digest{bad})
		})
		synctest.Wait()
		group.Go(func() {
			if got, err := cas.ReadAll(t.Context(), p.store, good, 100); err != nil || !bytes.Equal(got, want) {
				t.Errorf("the good one: got %d bytes, %v", len(got), err)
			}
		})
		synctest.Wait()
		gate.Open()
		group.Wait()
	})
}

// A copier is a far store that counts what is copied.
type copier struct {
	cas.Store
	from  *castest.Memory
	calls [][]cas.Digest
	fail  error
}

func (c *copier) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error) {
	c.calls = append(c.calls, ds)
	for _, d := range ds {
		b, err := cas.ReadAll(ctx, c.from, d, d.Size())
		if errors.Is(err, cas.ErrNotFound) {
			absent = append(absent, d)
			continue
		}
		if _, err := cas.PutBytes(ctx, to, cas.SHA256, b); err != nil {
			return nil, err
		}
	}
	return absent, c.fail
}

// TestFetchIsOneCopy of what is not near, and tells what is absent.
func TestFetchIsOneCopy(t *testing.T) {
	near, far := castest.NewMemory(), castest.NewMemory()
	faulty := castest.NewFaulty(far, nil)
	c := &copier{Store: faulty, from: far}
	o := open(t, overlay.Config{Local: one(near, near), Upstream: one(c, nil)})
	in, err := o.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	var ds []cas.Digest
	for i := range 10 {
		_, d := put(t, far, byte(i), 1000)
		ds = append(ds, d, d)
	}
	_, mine := put(t, near, 20, 1000)
	_, nowhere := castest.Blob(21, 1000)
	_, neither := castest.Blob(22, 1000)
	ds = append(ds, mine, nowhere, neither, cas.SHA256.Sum(nil))
	for range 2 {
		absent, err := in.Store.(cas.Fetcher).Fetch(t.Context(), ds)
		if err != nil || !slices.Equal(absent, []cas.Digest{nowhere, neither}) {
			t.Fatalf("got %v, %v, want the two that are nowhere", absent, err)
		}
	}
	if len(c.calls) != 2 || len(c.calls[0]) != 12 || o.Stats().Fetched != 10 || near.Len() != 11 || faulty.Calls(castest.Open) != 0 {
		t.Errorf("copied %v, fetched %d, near has %d, far was opened %d times", c.calls, o.Stats().Fetched, near.Len(), faulty.Calls(castest.Open))
	}
	// A failure is told, unless near has no room: then what is far is read there.
	_, d := put(t, far, 30, 1000)
	for _, want := range []error{cas.ErrUnavailable, cas.ErrFull} {
		near.Delete(d)
		c.fail = want
		if err := cas.Fetch(t.Context(), in.Store, []cas.Digest{d, nowhere}); (err == nil) != (want == cas.ErrFull) {
			t.Errorf("%v far: got %v", want, err)
		}
	}
}

// TestFetchSaysWhatIsAbsent where far is asked for each blob: it is not asked again.
func TestFetchSaysWhatIsAbsent(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, small := put(t, p.far, 1, 1000)
	_, large := put(t, p.far, 2, 2<<20)
	_, nowhere := castest.Blob(3, 1000)
	_, neither := castest.Blob(4, 2<<20)
	_, both := castest.Blob(5, 1000)
	for _, ds := range [][]cas.Digest{{small, nowhere, large, neither, nowhere, both}, {nowhere}, {neither}} {
		want := slices.DeleteFunc([]cas.Digest{nowhere, neither, both}, func(d cas.Digest) bool { return !slices.Contains(ds, d) })
		if absent, err := p.store.(cas.Fetcher).Fetch(t.Context(), ds); err != nil || !slices.Equal(absent, want) {
			t.Errorf("got %v, %v, want %v", absent, err, want)
		}
	}
	// That far cannot say is no absence.
	p.faulty.Fail(cas.ErrUnavailable, castest.Open)
	if absent, err := p.store.(cas.Fetcher).Fetch(t.Context(), []cas.Digest{nowhere, neither}); len(absent) > 0 {
		t.Errorf("with far away: got %v, %v", absent, err)
	}
}

// TestNearIsFull: what does not fit is read all the same.
func TestNearIsFull(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	want, d := put(t, p.far, 1, 1000)
	p.nearSide.Fail(cas.ErrFull, castest.Put, castest.PutAll)
	if err := cas.Fetch(t.Context(), p.store, []cas.Digest{d}); err != nil {
		t.Errorf("Fetch: %v", err)
	}
	if got, err := cas.ReadAll(t.Context(), p.store, d, 1000); err != nil || !bytes.Equal(got, want) || p.near.Len() != 0 {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
	wantError(t, "Put", p.store.Put(t.Context(), d, bytes.NewReader(want)), cas.ErrFull)
}

// TestDamageStaysFar: what far holds or sends wrongly never comes near.
func TestDamageStaysFar(t *testing.T) {
	for _, size := range []int{1000, 3 << 20} {
		p := newPair(t, overlay.WriteThrough)
		want, d := put(t, p.far, 1, size)
		for name, spoil := range map[string]func(){
			"cut": func() { p.faulty.Cut(500) }, "flipped": p.faulty.Flip, "stored": func() { p.far.Corrupt(d) },
		} {
			spoil()
			if got, err := cas.ReadAll(t.Context(), p.store, d, d.Size()); err == nil || has(t, p.near, d) {
				t.Errorf("%s: got %d bytes, and near has them", name, len(got))
			}
			p.faulty.Heal()
			if err := p.far.Put(t.Context(), d, bytes.NewReader(want)); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := cas.ReadAll(t.Context(), p.store, d, d.Size()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("healed: got %d bytes, %v", len(got), err)
		}
	}
}

func TestMissing(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			_, near := put(t, p.near, 1, 100)
			_, far := put(t, p.far, 2, 100)
			_, nowhere := castest.Blob(3, 100)
			ask := func(ds ...cas.Digest) ([]cas.Digest, error) { return p.store.Missing(t.Context(), ds) }
			if got, err := ask(far, nowhere, near, nowhere); err != nil || !slices.Equal(got, []cas.Digest{nowhere}) {
				t.Errorf("got %v, %v", got, err)
			}
			p.faulty.Fail(cas.ErrUnavailable, castest.Missing)
			if got, err := ask(near, near); err != nil || len(got) > 0 {
				t.Errorf("far is away, and near has all: got %v, %v", got, err)
			}
			got, err := ask(near, far, nowhere)
			if policy == overlay.WriteThrough {
				wantError(t, "far is away", err, cas.ErrUnavailable)
			} else if err != nil || !slices.Equal(got, []cas.Digest{far, nowhere}) || p.Stats().Unanswered != 1 {
				t.Errorf("far is away: got %v, %v, %d unasked", got, err, p.Stats().Unanswered)
			}
			p.faulty.Fail(errors.New("not you"), castest.Missing)
			if _, err := ask(nowhere); err == nil || !strings.Contains(err.Error(), "not you") {
				t.Errorf("far refuses: got %v", err)
			}
		})
	}
}

// TestFarIsAway: near goes on, nothing wrong is said, and why is known.
func TestFarIsAway(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			want, near := put(t, p.near, 1, 100)
			_, far := put(t, p.far, 2, 100)
			action, known := cas.SHA256.Sum([]byte("a")), cas.SHA256.Sum([]byte("b"))
			for m, d := range map[*castest.Memory]cas.Digest{p.far: action, p.near: known} {
				if err := m.Record(t.Context(), d, &repb.ActionResult{ExitCode: 3}); err != nil {
					t.Fatal(err)
				}
			}
			p.faulty.Fail(cas.ErrUnavailable, castest.Open, castest.Put, castest.PutAll, castest.Missing, castest.Lookup, castest.Record)
			if got, err := cas.ReadAll(t.Context(), p.store, near, 100); err != nil || !bytes.Equal(got, want) {
				t.Errorf("near: got %d bytes, %v", len(got), err)
			}
			_, err := cas.ReadAll(t.Context(), p.store, far, 100)
			wantError(t, "far", err, cas.ErrUnavailable)
			wantError(t, "Fetch", cas.Fetch(t.Context(), p.store, []cas.Digest{near, far}), cas.ErrUnavailable)
			if r, err := p.actions.Lookup(t.Context(), known); err != nil || r.ExitCode != 3 {
				t.Errorf("a result that is near: got %v, %v", r, err)
			}
			_, err = p.actions.Lookup(t.Context(), action)
			wantError(t, "a result that is far", err, cas.ErrNotFound)
			b, d := castest.Blob(3, 100)
			if err := p.actions.Record(t.Context(), action, &repb.ActionResult{}); err != nil {
				t.Errorf("Record: %v", err)
			}
			errs := append(p.store.(cas.Batcher).PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}}),
				p.store.Put(t.Context(), d, bytes.NewReader(b)))
			for _, err := range errs {
				if policy == overlay.WriteThrough {
					wantError(t, "write", err, cas.ErrUnavailable)
				} else if err != nil {
					t.Errorf("write: %v", err)
				}
			}
		})
	}
}

// TestBatchReadOfAServer: a server over an overlay asks far once for a batch, and gives out what is near when far
// is away.
func TestBatchReadOfAServer(t *testing.T) {
	near, far := castest.NewMemory(), castest.NewMemory()
	faulty := castest.NewFaulty(far, far)
	c := &copier{Store: faulty, from: far}
	o := open(t, overlay.Config{Local: one(near, near), Upstream: one(c, faulty)})
	client := blobsOf(t, o.Instance)
	read := func(ds ...cas.Digest) (got []codes.Code) {
		t.Helper()
		req := &repb.BatchReadBlobsRequest{}
		for _, d := range ds {
			req.Digests = append(req.Digests, d.Proto())
		}
		resp, err := client.BatchReadBlobs(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resp.Responses {
			got = append(got, codes.Code(r.GetStatus().GetCode()))
		}
		return got
	}
	var ds []cas.Digest
	for i := range 4 {
		_, d := put(t, far, byte(i), 1000)
		ds = append(ds, d)
	}
	if got := read(ds[:2]...); !slices.Equal(got, []codes.Code{codes.OK, codes.OK}) || len(c.calls) != 1 || faulty.Calls(castest.Open) != 0 {
		t.Errorf("got %v by %d copies and %d reads", got, len(c.calls), faulty.Calls(castest.Open))
	}
	for _, d := range ds[2:] {
		far.Delete(d)
	}
	c.fail = cas.ErrUnavailable
	faulty.Fail(cas.ErrUnavailable, castest.Open)
	if got := read(ds...); !slices.Equal(got, []codes.Code{codes.OK, codes.OK, codes.Unavailable, codes.Unavailable}) {
		t.Errorf("far is away: got %v", got)
	}
}

// TestWriteThrough: what is acknowledged is far, and a batch is one.
func TestWriteThrough(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, d := put(t, p.store, 1, 100)
	_, large := put(t, p.store, 2, 3<<20)
	put(t, p.store, 1, 0)
	if !has(t, p.far, d) || !has(t, p.far, large) || p.faulty.Calls(castest.Put) != 2 {
		t.Errorf("far was put %d blobs", p.faulty.Calls(castest.Put))
	}
	var blobs []cas.Blob
	for i := range 20 {
		b, d := castest.Blob(byte(i), 500)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	blobs[3].Data = blobs[4].Data
	for i, err := range p.store.(cas.Batcher).PutAll(t.Context(), blobs) {
		if i != 3 && (err != nil || !has(t, p.far, blobs[i].Digest)) {
			t.Errorf("blob %d: %v", i, err)
		}
	}
	if n := p.faulty.Calls(castest.PutAll); n != 1 || p.far.Len() != 21 {
		t.Errorf("far was put %d batches and has %d blobs", n, p.far.Len())
	}
}

// A strict action cache takes results that are complete.
type strict struct {
	*castest.Faulty
	store cas.Store
	t     *testing.T
}

func (s *strict) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	ds, err := cas.Closure(ctx, s.store, cas.SHA256, r)
	if err != nil {
		s.t.Errorf("a result came far before its Trees: %v", err)
	}
	if missing, err := s.store.Missing(ctx, ds); err != nil || len(missing) > 0 {
		s.t.Errorf("a result came far before its blobs: %v, %v", missing, err)
	}
	return s.Faulty.Record(ctx, action, r)
}

// newStrict is newPair with a far action cache that takes complete results alone.
func newStrict(t *testing.T, policy overlay.Policy) *pair {
	p := newPair(t, policy)
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Overlay = open(t, overlay.Config{
		Local: one(p.nearSide, p.nearSide), Upstream: one(p.faulty, &strict{p.faulty, p.far, t}), Policy: policy, Journal: p.journal,
	})
	in, err := p.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	p.store, p.actions = in.Store, in.Actions
	return p
}

// built is a result with a file, a Tree and a file in it, put into s.
func built(t *testing.T, s cas.Store, seed byte) (action cas.Digest, r *repb.ActionResult) {
	t.Helper()
	_, file := put(t, s, seed, 100+int(seed))
	_, inner := put(t, s, seed, 2<<20)
	tree, err := cas.PutProto(t.Context(), s, cas.SHA256, &repb.Tree{Root: &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: inner.Proto()}}}})
	if err != nil {
		t.Fatal(err)
	}
	return cas.SHA256.Sum([]byte{seed}), &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "o", Digest: file.Proto()}},
		OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: tree.Proto()}},
	}
}

// TestResults: what is recorded is near and far, with all that it refers to, wherever that was.
func TestResults(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newStrict(t, policy)
			action, r := built(t, p.near, 1) // behind the overlay's back
			if err := p.actions.Record(t.Context(), action, r); err != nil {
				t.Fatal(err)
			}
			// One of whose blobs nobody has any stays near.
			lonely := cas.SHA256.Sum([]byte("lonely"))
			_, nowhere := castest.Blob(9, 9)
			if err := p.actions.Record(t.Context(), lonely, &repb.ActionResult{StdoutDigest: nowhere.Proto()}); err != nil {
				t.Fatal(err)
			}
			p.drain(t)
			for _, m := range []*castest.Memory{p.near, p.far} {
				if got, err := m.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) {
					t.Errorf("got %v, %v", got, err)
				}
			}
			_, err := p.far.Lookup(t.Context(), lonely)
			wantError(t, "an incomplete result, far", err, cas.ErrNotFound)
		})
	}
}

func TestLookupComesNear(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	action, r := built(t, p.far, 1)
	if err := p.far.Record(t.Context(), action, r); err != nil {
		t.Fatal(err)
	}
	in, err := p.Instance("")
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got, err := cas.LookupComplete(t.Context(), in, action); err != nil || !proto.Equal(got, r) {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	if n := p.faulty.Calls(castest.Lookup); n != 1 {
		t.Errorf("far was asked %d times", n)
	}
	// A hit some of whose blobs are gone everywhere is none.
	p.far.Delete(cas.SHA256.Sum(nil))
	for _, d := range p.far.Digests() {
		p.far.Delete(d)
	}
	_, err = cas.LookupComplete(t.Context(), in, action)
	wantError(t, "blobs are gone", err, cas.ErrNotFound)
	// Near may have damaged it, or be unable to keep it.
	p.nearSide.FailNth(castest.Lookup, 1, cas.ErrCorrupt)
	if got, err := p.actions.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) {
		t.Errorf("damaged near: got %v, %v", got, err)
	}
	p.nearSide.Fail(cas.ErrFull, castest.Record)
	other := cas.SHA256.Sum([]byte("other"))
	if err := p.far.Record(t.Context(), other, r); err != nil {
		t.Fatal(err)
	}
	if _, err := p.actions.Lookup(t.Context(), other); err != nil {
		t.Errorf("near is full: %v", err)
	}
}

// TestLoss: of blobs lost at random, near and far, none is called present that cannot be read.
func TestLoss(t *testing.T) {
	for seed := range uint64(5) {
		p := newPair(t, overlay.WriteThrough)
		want := map[cas.Digest][]byte{}
		var ds []cas.Digest
		for i := range 200 {
			b := fmt.Append(nil, i)
			d, err := cas.PutBytes(t.Context(), p.store, cas.SHA256, b)
			if err != nil {
				t.Fatal(err)
			}
			ds, want[d] = append(ds, d), b
		}
		gone := map[cas.Digest]int{}
		for _, d := range slices.Concat(p.nearSide.Lose(seed, 0.3), p.faulty.Lose(seed+100, 0.3)) {
			gone[d]++
		}
		missing, err := p.store.Missing(t.Context(), ds)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range ds {
			got, err := cas.ReadAll(t.Context(), p.store, d, 100)
			if lost := gone[d] == 2; lost != slices.Contains(missing, d) || lost != errors.Is(err, cas.ErrNotFound) || !lost && !bytes.Equal(got, want[d]) {
				t.Errorf("seed %d: lost %d times, missing %v, read %q, %v", seed, gone[d], slices.Contains(missing, d), got, err)
			}
		}
	}
}
