// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

var policies = map[string]overlay.Policy{"WriteThrough": overlay.WriteThrough, "WriteBack": overlay.WriteBack}

// one returns instances that share a store.
func one(s cas.Store, ac cas.ActionCache) cas.Instances {
	return func(name string) (*cas.Instance, error) { return &cas.Instance{Name: name, Store: s, Actions: ac}, nil }
}

// A pair is an overlay of two stores in memory with injected faults.
type pair struct {
	*overlay.Overlay
	local, upstream             *castest.Memory
	faultyLocal, faultyUpstream *faulty.Store // over these
	store                       cas.Store
	actions                     cas.ActionCache
	journal                     string
}

// newPair returns an overlay that is closed with the test.
func newPair(t *testing.T, policy overlay.Policy) *pair {
	t.Helper()
	p := &pair{
		local: castest.NewMemory(), upstream: castest.NewMemory(),
		journal: filepath.Join(t.TempDir(), "journal"),
	}
	p.faultyLocal, p.faultyUpstream = faulty.New(p.local, p.local), faulty.New(p.upstream, p.upstream)
	p.Overlay = open(t, overlay.Config{
		Local:    one(p.faultyLocal, p.faultyLocal),
		Upstream: one(p.faultyUpstream, p.faultyUpstream), Policy: policy, Journal: p.journal,
	})
	in := instance(t, p.Overlay)
	p.store, p.actions = in.Store, in.Actions
	return p
}

func open(t testing.TB, c overlay.Config) *overlay.Overlay {
	t.Helper()
	if c.Journal == "" {
		c.Journal = filepath.Join(t.TempDir(), "journal")
	}
	o := must.Get(overlay.New(c))(t)
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		o.Close(ctx)
	})
	return o
}

// instance returns the instance "" of o.
func instance(t *testing.T, o *overlay.Overlay) *cas.Instance {
	t.Helper()
	return must.Get(o.Instance(""))(t)
}

// drain closes p after it has sent everything.
func (p *pair) drain(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // enough in every case
	defer cancel()
	must.Succeed(t, p.Close(ctx))
}

// put stores a blob in m.
func put(t *testing.T, m cas.Store, seed byte, size int) ([]byte, cas.Digest) {
	t.Helper()
	b, d := castest.Blob(seed, size)
	must.Succeed(t, m.Put(t.Context(), d, bytes.NewReader(b)))
	return b, d
}

// disconnect makes all calls of f fail, like those of an unreachable store.
func disconnect(f *faulty.Store) {
	f.Fail(cas.ErrUnavailable, faulty.Open, faulty.Put, faulty.PutAll, faulty.Missing, faulty.Lookup, faulty.Record)
}

func has(t *testing.T, s cas.Store, d cas.Digest) bool {
	t.Helper()
	return len(must.Get(s.Missing(t.Context(), []cas.Digest{d}))(t)) == 0
}

func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	expect.Error(t, err, want, "%s", what)
}

func TestContracts(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			castest.TestStore(t, func(t *testing.T) cas.Store { return newPair(t, policy).store })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return newPair(t, policy).actions })
		})
	}
}

// TestContractsOfPlainStores uses stores without optional capabilities.
func TestContractsOfPlainStores(t *testing.T) {
	t.Parallel()
	castest.TestStore(t, func(t *testing.T) cas.Store {
		local, upstream := struct{ cas.Store }{castest.NewMemory()}, struct{ cas.Store }{castest.NewMemory()}
		in := instance(t, open(t, overlay.Config{Local: one(local, nil), Upstream: one(upstream, nil)}))
		return in.Store
	})
}

// serve starts a server for instances on loopback and returns its address.
func serve(t testing.TB, instances cas.Instances) string {
	t.Helper()
	g := grpc.NewServer(casserver.ServerOptions(slog.New(slog.DiscardHandler))...)
	casserver.Register(g, casserver.Config{Instances: instances})
	return grpctest.Listen(t, g)
}

// blobsOf returns a gRPC client of a new server for instances.
func blobsOf(t *testing.T, instances cas.Instances) repb.ContentAddressableStorageClient {
	t.Helper()
	conn := grpctest.Dial(t, serve(t, instances))
	return repb.NewContentAddressableStorageClient(conn)
}

// served returns a remote.Client of a new server for instances.
func served(t *testing.T, instances cas.Instances) *remote.Client {
	t.Helper()
	c := must.Get(remote.New("grpc://" + serve(t, instances)))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

// onDisk returns instances of a disk store.
func onDisk(t *testing.T, dir string) cas.Instances {
	t.Helper()
	c := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 256 << 20}))(t)
	t.Cleanup(func() { c.Close() })
	return c.Instance
}

// TestContractsOfDiskAndServer uses the stores of a real installation.
func TestContractsOfDiskAndServer(t *testing.T) {
	for name, policy := range policies {
		instance := func(t *testing.T) *cas.Instance {
			in := must.Get(open(t, overlay.Config{
				Local: onDisk(t, t.TempDir()), Upstream: served(t, castest.Instances()).Instance,
				Policy: policy, Journal: filepath.Join(t.TempDir(), "journal"),
			}).Instance("a/b"))(t)
			return in
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			castest.TestStore(t, func(t *testing.T) cas.Store { return instance(t).Store })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return instance(t).Actions })
			s := instance(t).Store
			_, filer := cas.As[cas.Filer](s)
			_, locator := cas.As[cas.Locator](s)
			_, splicer := cas.As[cas.Splicer](s)
			expect.That(t, filer && locator && splicer,
				"over a disk: got Filer %v, Locator %v, Splicer %v, want all", filer, locator, splicer)
		})
	}
}

func TestInstancesAreSeparate(t *testing.T) {
	local, upstream := castest.Instances(), castest.Instances()
	o := open(t, overlay.Config{Local: local, Upstream: upstream})
	a := must.Get(o.Instance("a"))(t)
	_, d := put(t, a.Store, 1, 100)
	for name, want := range map[string]bool{"a": true, "b": false, "": false} {
		for _, instances := range []cas.Instances{local, upstream, o.Instance} {
			in := must.Get(instances(name))(t)
			expect.That(t, in.Name == name && has(t, in.Store, d) == want,
				"instance %q: got name %q, blob present %v, want %v", name, in.Name, !want, want)
		}
	}
	expect.Error(t, expect.Err(o.Instance("blobs")), cas.ErrInvalid, "instance \"blobs\"")
}

func TestFileIsFetched(t *testing.T) {
	upstream := castest.NewMemory()
	in := instance(t, open(t, overlay.Config{Local: onDisk(t, t.TempDir()), Upstream: one(upstream, upstream)}))
	_, d := put(t, upstream, 1, 100_000)
	filer, _ := cas.As[cas.Filer](in.Store)
	path, release, err := filer.File(t.Context(), d, true)
	must.Succeed(t, err)
	expect.That(t, path != "", "no path")
	release()
}

// TestConcurrentReadsFetchOnce checks that concurrent and later reads cause one upstream read.
func TestConcurrentReadsFetchOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		want, d := put(t, p.upstream, 1, 100_000)
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		for i := range 50 {
			group.Go(func() {
				if i%2 == 0 {
					expect.Error(t, cas.Fetch(t.Context(), p.store, []cas.Digest{d}), nil)
				}
				got, err := cas.ReadAll(t.Context(), p.store, d, d.Size())
				expect.That(t, err == nil && bytes.Equal(got, want), "got %d bytes, %v", len(got), err)
			})
		}
		synctest.Wait() // all wait for the flight
		gate.Open()
		group.Wait()
		if n := p.faultyUpstream.Calls(faulty.Open); n != 1 || !has(t, p.local, d) || p.Stats().Fetched != 1 {
			t.Errorf("got %d upstream reads and %d fetched, want 1 and 1", n, p.Stats().Fetched)
		}
	})
}

// TestCancelledReadKeepsFlight checks that a cancelled read harms neither other readers nor its own retry.
func TestCancelledReadKeepsFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, d := put(t, p.upstream, 1, 1000)
		gate := p.faultyUpstream.Hold(faulty.Open)
		read := func(ctx context.Context) chan error {
			done := make(chan error, 1)
			go func() {
				_, err := cas.ReadAll(ctx, p.store, d, d.Size())
				done <- err
			}()
			synctest.Wait()
			return done
		}
		first, leave := context.WithCancel(t.Context())
		a, b := read(first), read(t.Context())
		leave()
		wantError(t, "the cancelled read", <-a, context.Canceled)
		gate.Open()
		if err := <-b; err != nil || p.faultyUpstream.Calls(faulty.Open) != 1 {
			t.Errorf("the other read: got %v after %d upstream reads, want 1", err,
				p.faultyUpstream.Calls(faulty.Open))
		}

		p.local.Delete(d)
		p.faultyUpstream.Hold(faulty.Open)
		gate = p.faultyUpstream.Hold(faulty.Open)
		for range 3 {
			only, leave := context.WithCancel(t.Context())
			a = read(only)
			leave()
			wantError(t, "the only read", <-a, context.Canceled)
		}
		gate.Open()
		synctest.Wait()
		if n := p.faultyUpstream.Calls(faulty.Open); n != 2 || !has(t, p.local, d) {
			t.Errorf("got local %v after %d upstream reads, want true after 2", has(t, p.local, d), n)
		}
	})
}

// TestOrphansAreBounded checks that some of the flights without waiters continue.
func TestOrphansAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		for range 2 { // finished orphans do not count
			gate := p.faultyUpstream.Hold(faulty.Open)
			for _, n := range []int{8, 8, 20} { // a flight that is orphaned twice counts once
				ctx, leave := context.WithCancel(t.Context())
				var group sync.WaitGroup
				for i := range n {
					_, d := put(t, p.upstream, byte(i), 1000)
					p.local.Delete(d)
					group.Go(func() {
						_, err := p.store.Open(ctx, d, 0)
						wantError(t, "cancelled read", err, context.Canceled)
					})
				}
				synctest.Wait()
				leave()
				group.Wait()
				synctest.Wait()
			}
			gate.Open()
			synctest.Wait()
			expect.Equal(t, p.local.Len(), 16, "of 20 blobs were fetched")
		}
	})
}

// A stuckCopier is an upstream whose Fetch blocks until free is closed.
type stuckCopier struct {
	cas.Store
	free chan struct{}
}

func (s *stuckCopier) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) ([]cas.Digest, error) {
	<-s.free
	return nil, nil
}

// TestSingleReadDoesNotJoinBatch checks that a read of one blob does not wait for the batch of another call.
func TestSingleReadDoesNotJoinBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local, upstream := castest.NewMemory(), castest.NewMemory()
		flaky := faulty.New(upstream, nil)
		s := &stuckCopier{flaky, make(chan struct{})}
		in := instance(t, open(t, overlay.Config{Local: one(local, local), Upstream: one(s, nil)}))
		_, a := put(t, upstream, 1, 100)
		_, b := put(t, upstream, 2, 100)
		var group sync.WaitGroup
		group.Go(func() {
			expect.Error(t, cas.Fetch(t.Context(), in.Store, []cas.Digest{a, b}), nil)
		})
		synctest.Wait()
		gate := flaky.Hold(faulty.Open)
		var readers sync.WaitGroup
		for range 5 {
			readers.Go(func() {
				expect.Error(t, expect.Err(cas.ReadAll(t.Context(), in.Store, a, 100)), nil)
			})
		}
		synctest.Wait()
		gate.Open()
		readers.Wait()
		expect.Equal(t, flaky.Calls(faulty.Open), 1, "upstream reads")
		close(s.free)
		group.Wait()
	})
}

// TestBatchFailureIsOfOneBlob checks that a damaged blob of a batch does not fail the others.
func TestBatchFailureIsOfOneBlob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteThrough)
		_, bad := put(t, p.upstream, 1, 100)
		want, good := put(t, p.upstream, 2, 100)
		p.upstream.Corrupt(bad)
		gate := p.faultyUpstream.Hold(faulty.Open)
		var group sync.WaitGroup
		group.Go(func() {
			expect.Error(t, cas.Fetch(t.Context(), p.store, []cas.Digest{bad, good}), nil, "Fetch of both")
			_, err := p.store.Open(t.Context(), bad, 0)
			wantError(t, "Open of the damaged blob", err, cas.ErrCorrupt)
			wantMissing(t, "after the fetch", p.store, []cas.Digest{bad, good}, []cas.Digest{bad})
		})
		synctest.Wait()
		group.Go(func() {
			if got, err := cas.ReadAll(t.Context(), p.store, good, 100); err != nil || !bytes.Equal(got, want) {
				t.Errorf("read of the intact blob: got %d bytes, %v", len(got), err)
			}
		})
		synctest.Wait()
		gate.Open()
		group.Wait()
	})
}

// A copier is an upstream store that records the calls of Fetch.
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

// TestFetchUsesCopier checks that Fetch takes one call for all absent blobs, and reports those that are nowhere.
func TestFetchUsesCopier(t *testing.T) {
	local, upstream := castest.NewMemory(), castest.NewMemory()
	flaky := faulty.New(upstream, nil)
	c := &copier{Store: flaky, from: upstream}
	o := open(t, overlay.Config{Local: one(local, local), Upstream: one(c, nil)})
	in := instance(t, o)
	var ds []cas.Digest
	for i := range 10 {
		_, d := put(t, upstream, byte(i), 1000)
		ds = append(ds, d, d)
	}
	_, mine := put(t, local, 20, 1000)
	_, nowhere := castest.Blob(21, 1000)
	_, neither := castest.Blob(22, 1000)
	ds = append(ds, mine, nowhere, neither, cas.SHA256.Sum(nil))
	for range 2 {
		absent, err := in.Store.(cas.Fetcher).Fetch(t.Context(), ds)
		must.Be(t, err == nil && slices.Equal(absent, []cas.Digest{nowhere, neither}),
			"got %v, %v, want the two blobs that are nowhere", absent, err)
	}
	if len(c.calls) != 2 || len(c.calls[0]) != 12 || o.Stats().Fetched != 10 || local.Len() != 11 ||
		flaky.Calls(faulty.Open) != 0 {
		t.Errorf("got calls %v, %d fetched, %d local, %d upstream reads", c.calls, o.Stats().Fetched, local.Len(),
			flaky.Calls(faulty.Open))
	}
	// A failure is returned, unless the local store is full: then reads use the upstream.
	_, d := put(t, upstream, 30, 1000)
	disconnect(flaky)
	for _, want := range []error{cas.ErrUnavailable, cas.ErrFull} {
		local.Delete(d)
		c.fail = want
		if err := cas.Fetch(t.Context(), in.Store, []cas.Digest{d, nowhere}); (err == nil) != (want == cas.ErrFull) {
			t.Errorf("upstream fails with %v: got %v", want, err)
		}
	}
}

// readLocal calls ReadLocal with a limit of 1,000 bytes.
func readLocal(t *testing.T, s cas.Store, ds ...cas.Digest) [][]byte {
	t.Helper()
	r, ok := cas.As[interface {
		ReadLocal(ctx context.Context, ds []cas.Digest, limit int64) [][]byte
	}](s)
	must.Be(t, ok, "the store lacks ReadLocal")
	return r.ReadLocal(t.Context(), ds, 1000)
}

// TestReadLocalAsksNoUpstream reads a local blob and others.
func TestReadLocalAsksNoUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, overlay.WriteBack)
		data, here := put(t, p.local, 1, 1000)
		_, large := put(t, p.local, 2, 1001)
		_, there := put(t, p.upstream, 3, 1000)
		empty := cas.SHA256.Sum(nil)
		got := readLocal(t, p.store, there, here, large, empty, here, cas.Digest{})
		want := [][]byte{nil, data, nil, {}, data, nil}
		for i := range want {
			expect.That(t, bytes.Equal(got[i], want[i]) && (got[i] == nil) == (want[i] == nil),
				"blob %d: got %d bytes, %t, want %d", i, len(got[i]), got[i] != nil, len(want[i]))
		}
		expect.Equal(t, p.faultyUpstream.Calls(faulty.Open)+p.faultyUpstream.Calls(faulty.Missing), 0, "calls of the upstream")
	})
}

// TestFetchReportsAbsentBlobs uses an upstream without Copier.
func TestFetchReportsAbsentBlobs(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, small := put(t, p.upstream, 1, 1000)
	_, large := put(t, p.upstream, 2, 2<<20)
	_, nowhere := castest.Blob(3, 1000)
	_, neither := castest.Blob(4, 2<<20)
	_, both := castest.Blob(5, 1000)
	for _, ds := range [][]cas.Digest{{small, nowhere, large, neither, nowhere, both}, {nowhere}, {neither}} {
		want := slices.DeleteFunc([]cas.Digest{nowhere, neither, both},
			func(d cas.Digest) bool { return !slices.Contains(ds, d) })
		expect.Slices(t, must.Get(p.store.(cas.Fetcher).Fetch(t.Context(), ds))(t), want)
	}
	// An unreachable upstream does not mean absence.
	disconnect(p.faultyUpstream)
	if absent, err := p.store.(cas.Fetcher).Fetch(t.Context(), []cas.Digest{nowhere, neither}); len(absent) > 0 {
		t.Errorf("upstream unavailable: got %v, %v", absent, err)
	}
}

// TestLocalStoreIsFull checks that reads then use the upstream.
// TestWriteStatusAsksNoUpstream checks that QueryWriteStatus never waits for the upstream.
func TestWriteStatusAsksNoUpstream(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			_, d := put(t, p.upstream, 1, 3<<20)
			uploads := bspb.NewByteStreamClient(grpctest.Dial(t, serve(t, p.Instance)))
			_, err := uploads.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{
				ResourceName: "uploads/e8d0ce4e-9ff6-4f0c-8c1c-b1a3e3b8f6a5/" + d.Resource(),
			})
			expect.Equal(t, status.Code(err), codes.NotFound, "%v", err)
			expect.Equal(t, p.faultyUpstream.Calls(faulty.Missing), 0, "queries of the upstream")
		})
	}
}

func TestLocalStoreIsFull(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	want, d := put(t, p.upstream, 1, 1000)
	p.faultyLocal.Fail(cas.ErrFull, faulty.Put, faulty.PutAll)
	expect.Error(t, cas.Fetch(t.Context(), p.store, []cas.Digest{d}), nil, "Fetch")
	if got, err := cas.ReadAll(t.Context(), p.store, d, 1000); err != nil || !bytes.Equal(got, want) ||
		p.local.Len() != 0 {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
	wantError(t, "Put", p.store.Put(t.Context(), d, bytes.NewReader(want)), cas.ErrFull)
}

// TestDamagedBlobsAreNotCopied covers damage in the upstream and in transit.
func TestDamagedBlobsAreNotCopied(t *testing.T) {
	for _, size := range []int{1000, 3 << 20} {
		p := newPair(t, overlay.WriteThrough)
		want, d := put(t, p.upstream, 1, size)
		for name, spoil := range map[string]func(){
			"cut": func() { p.faultyUpstream.Cut(500) }, "flipped": p.faultyUpstream.Flip,
			"stored": func() { p.upstream.Corrupt(d) },
		} {
			spoil()
			if got, err := cas.ReadAll(t.Context(), p.store, d, d.Size()); err == nil || has(t, p.local, d) {
				t.Errorf("%s: got %d bytes, which are also local; want an error", name, len(got))
			}
			p.faultyUpstream.Heal()
			must.Succeed(t, p.upstream.Put(t.Context(), d, bytes.NewReader(want)))
		}
		expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), p.store, d, d.Size()))(t)), string(want), "healed")
	}
}

func TestMissing(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			_, here := put(t, p.local, 1, 100)
			_, there := put(t, p.upstream, 2, 100)
			_, nowhere := castest.Blob(3, 100)
			missing := func(ds ...cas.Digest) ([]cas.Digest, error) { return p.store.Missing(t.Context(), ds) }
			expect.Slices(t, must.Get(missing(there, nowhere, here, nowhere))(t), []cas.Digest{nowhere})
			p.faultyUpstream.Fail(cas.ErrUnavailable, faulty.Missing)
			expect.Equal(t, len(must.Get(missing(here, here))(t)), 0, "upstream unavailable, all local")
			got, err := missing(here, there, nowhere)
			if policy == overlay.WriteThrough {
				wantError(t, "upstream unavailable", err, cas.ErrUnavailable)
			} else if err != nil || !slices.Equal(got, []cas.Digest{there, nowhere}) || p.Stats().Unanswered != 1 {
				t.Errorf("upstream unavailable: got %v, %v, %d unanswered", got, err, p.Stats().Unanswered)
			}
			p.faultyUpstream.Fail(errors.New("not you"), faulty.Missing)
			expect.Message(t, expect.Err(missing(nowhere)), "not you", "upstream refuses")
		})
	}
}

// TestUnavailableUpstream checks that local blobs and results are served, and that other errors have the right kind.
func TestUnavailableUpstream(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			want, here := put(t, p.local, 1, 100)
			_, there := put(t, p.upstream, 2, 100)
			action, known := cas.SHA256.Sum([]byte("a")), cas.SHA256.Sum([]byte("b"))
			for m, d := range map[*castest.Memory]cas.Digest{p.upstream: action, p.local: known} {
				must.Succeed(t, m.Record(t.Context(), d, &repb.ActionResult{ExitCode: 3}))
			}
			disconnect(p.faultyUpstream)
			expect.Equal(t, string(must.Get(cas.ReadAll(t.Context(), p.store, here, 100))(t)), string(want),
				"local blob")
			_, err := cas.ReadAll(t.Context(), p.store, there, 100)
			wantError(t, "upstream blob", err, cas.ErrUnavailable)
			wantError(t, "Fetch", cas.Fetch(t.Context(), p.store, []cas.Digest{here, there}), cas.ErrUnavailable)
			expect.Equal(t, must.Get(p.actions.Lookup(t.Context(), known))(t).ExitCode, 3, "local result")
			_, err = p.actions.Lookup(t.Context(), action)
			wantError(t, "upstream result", err, cas.ErrNotFound)
			b, d := castest.Blob(3, 100)
			expect.Error(t, p.actions.Record(t.Context(), action, &repb.ActionResult{}), nil, "Record")
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

// TestServerReadsBatches checks that a server on an overlay reads a batch with one upstream call, and serves local
// blobs if the upstream is unavailable.
func TestServerReadsBatches(t *testing.T) {
	local, upstream := castest.NewMemory(), castest.NewMemory()
	flaky := faulty.New(upstream, upstream)
	c := &copier{Store: flaky, from: upstream}
	o := open(t, overlay.Config{Local: one(local, local), Upstream: one(c, flaky)})
	client := blobsOf(t, o.Instance)
	read := func(ds ...cas.Digest) (got []codes.Code) {
		t.Helper()
		req := &repb.BatchReadBlobsRequest{}
		for _, d := range ds {
			req.Digests = append(req.Digests, d.Proto())
		}
		resp := must.Get(client.BatchReadBlobs(t.Context(), req))(t)
		for _, r := range resp.Responses {
			got = append(got, codes.Code(r.GetStatus().GetCode()))
		}
		return got
	}
	var ds []cas.Digest
	for i := range 4 {
		_, d := put(t, upstream, byte(i), 1000)
		ds = append(ds, d)
	}
	if got := read(ds[:2]...); !slices.Equal(got, []codes.Code{codes.OK, codes.OK}) || len(c.calls) != 1 ||
		flaky.Calls(faulty.Open) != 0 {
		t.Errorf("got %v with %d copies and %d reads, want 1 and 0", got, len(c.calls), flaky.Calls(faulty.Open))
	}
	for _, d := range ds[2:] {
		upstream.Delete(d)
	}
	c.fail = cas.ErrUnavailable
	disconnect(flaky)
	expect.Slices(t, read(ds...), []codes.Code{codes.OK, codes.OK, codes.Unavailable, codes.Unavailable},
		"upstream unavailable")
}

// TestWriteThrough checks that acknowledged blobs are in the upstream, and that a batch stays one.
func TestWriteThrough(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	_, d := put(t, p.store, 1, 100)
	_, large := put(t, p.store, 2, 3<<20)
	put(t, p.store, 1, 0)
	expect.That(t, has(t, p.upstream, d) && has(t, p.upstream, large) && p.faultyUpstream.Calls(faulty.Put) == 2,
		"got %d upstream writes, want 2", p.faultyUpstream.Calls(faulty.Put))
	var blobs []cas.Blob
	for i := range 20 {
		b, d := castest.Blob(byte(i), 500)
		blobs = append(blobs, cas.Blob{Digest: d, Data: b})
	}
	blobs[3].Data = blobs[4].Data
	for i, err := range p.store.(cas.Batcher).PutAll(t.Context(), blobs) {
		if i != 3 && (err != nil || !has(t, p.upstream, blobs[i].Digest)) {
			t.Errorf("blob %d: %v", i, err)
		}
	}
	if n := p.faultyUpstream.Calls(faulty.PutAll); n != 1 || p.upstream.Len() != 21 {
		t.Errorf("got %d upstream batches and %d blobs, want 1 and 21", n, p.upstream.Len())
	}
}

// A strictCache is an action cache that fails the test for incomplete results.
type strictCache struct {
	*faulty.Store
	store cas.Store
	t     *testing.T
}

func (s *strictCache) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	ds, err := cas.Closure(ctx, s.store, cas.SHA256, r)
	expect.Error(s.t, err, nil, "a result was sent before its Trees")
	expect.Equal(s.t, len(must.Get(s.store.Missing(ctx, ds))(s.t)), 0, "a result was sent before its blobs")
	return s.Store.Record(ctx, action, r)
}

// newStrict is newPair with a strictCache upstream.
func newStrict(t *testing.T, policy overlay.Policy) *pair {
	p := newPair(t, policy)
	must.Succeed(t, p.Close(t.Context()))
	p.Overlay = open(t, overlay.Config{
		Local: one(p.faultyLocal, p.faultyLocal), Upstream: one(p.faultyUpstream,
			&strictCache{p.faultyUpstream, p.upstream, t}), Policy: policy, Journal: p.journal,
	})
	in := instance(t, p.Overlay)
	p.store, p.actions = in.Store, in.Actions
	return p
}

// built stores a result in s, with a file, a Tree and a file in it.
func built(t *testing.T, s cas.Store, seed byte) (action cas.Digest, r *repb.ActionResult) {
	t.Helper()
	_, file := put(t, s, seed, 100+int(seed))
	_, inner := put(t, s, seed, 2<<20)
	tree := must.Get(cas.PutProto(t.Context(), s, cas.SHA256,
		&repb.Tree{Root: &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: inner.Proto()}}}}))(t)
	return cas.SHA256.Sum([]byte{seed}), &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "o", Digest: file.Proto()}},
		OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: tree.Proto()}},
	}
}

// TestResults checks that a recorded result and its blobs reach the upstream, wherever the blobs were.
func TestResults(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newStrict(t, policy)
			action, r := built(t, p.local, 1) // without the overlay
			must.Succeed(t, p.actions.Record(t.Context(), action, r))
			// A result with absent blobs stays local.
			lonely := cas.SHA256.Sum([]byte("lonely"))
			_, nowhere := castest.Blob(9, 9)
			must.Succeed(t, p.actions.Record(t.Context(), lonely,
				&repb.ActionResult{StdoutDigest: nowhere.Proto()}))
			p.drain(t)
			for _, m := range []*castest.Memory{p.local, p.upstream} {
				if got, err := m.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) {
					t.Errorf("got %v, %v", got, err)
				}
			}
			_, err := p.upstream.Lookup(t.Context(), lonely)
			wantError(t, "incomplete result in the upstream", err, cas.ErrNotFound)
		})
	}
}

func TestLookupRecordsLocally(t *testing.T) {
	p := newPair(t, overlay.WriteThrough)
	action, r := built(t, p.upstream, 1)
	must.Succeed(t, p.upstream.Record(t.Context(), action, r))
	in := instance(t, p.Overlay)
	for range 3 {
		if got, err := cas.LookupComplete(t.Context(), in, action); err != nil || !proto.Equal(got, r) {
			t.Fatalf("got %v, %v", got, err)
		}
	}
	expect.Equal(t, p.faultyUpstream.Calls(faulty.Lookup), 1, "upstream lookups")
	// A result with lost blobs is a miss.
	p.upstream.Delete(cas.SHA256.Sum(nil))
	for _, d := range p.upstream.Digests() {
		p.upstream.Delete(d)
	}
	_, err := cas.LookupComplete(t.Context(), in, action)
	wantError(t, "blobs are lost", err, cas.ErrNotFound)
	// The local store may have a damaged result, or no room.
	p.faultyLocal.FailNth(faulty.Lookup, 1, cas.ErrCorrupt)
	if got, err := p.actions.Lookup(t.Context(), action); err != nil || !proto.Equal(got, r) {
		t.Errorf("damaged local result: got %v, %v", got, err)
	}
	p.faultyLocal.Fail(cas.ErrFull, faulty.Record)
	other := cas.SHA256.Sum([]byte("other"))
	must.Succeed(t, p.upstream.Record(t.Context(), other, r))
	expect.Error(t, expect.Err(p.actions.Lookup(t.Context(), other)), nil, "local store full")
}

// TestLostBlobsAreMissing checks that no unreadable blob is reported present after random losses in both stores.
func TestLostBlobsAreMissing(t *testing.T) {
	for seed := range uint64(5) {
		p := newPair(t, overlay.WriteThrough)
		want := map[cas.Digest][]byte{}
		var ds []cas.Digest
		for i := range 200 {
			b := fmt.Append(nil, i)
			d := must.Get(cas.PutBytes(t.Context(), p.store, cas.SHA256, b))(t)
			ds, want[d] = append(ds, d), b
		}
		gone := map[cas.Digest]int{}
		for _, d := range slices.Concat(p.faultyLocal.Lose(seed, 0.3), p.faultyUpstream.Lose(seed+100, 0.3)) {
			gone[d]++
		}
		missing := must.Get(p.store.Missing(t.Context(), ds))(t)
		for _, d := range ds {
			got, err := cas.ReadAll(t.Context(), p.store, d, 100)
			if lost := gone[d] == 2; lost != slices.Contains(missing, d) || lost != errors.Is(err, cas.ErrNotFound) ||
				!lost && !bytes.Equal(got, want[d]) {
				t.Errorf("seed %d: lost %d times, missing %v, read %q, %v", seed, gone[d], slices.Contains(missing, d),
					got, err)
			}
		}
	}
}
