// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// streamsTo returns a ByteStream client of a new server for instances.
func streamsTo(t testing.TB, instances cas.Instances) bspb.ByteStreamClient {
	t.Helper()
	conn, err := grpc.NewClient(serve(t, instances), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return bspb.NewByteStreamClient(conn)
}

// stream uploads b with one message.
func stream(ctx context.Context, c bspb.ByteStreamClient, b []byte) (cas.Digest, error) {
	d := cas.SHA256.Sum(b)
	s, err := c.Write(ctx)
	if err != nil {
		return d, err
	}
	err = s.Send(&bspb.WriteRequest{ResourceName: "uploads/u/" + d.Resource(), Data: b, FinishWrite: true})
	if err != nil && err != io.EOF {
		return d, err
	}
	_, err = s.CloseAndRecv()
	return d, err
}

// TestStreamedWriteDoesNotAsk checks that nobody asks the upstream for a blob that is being uploaded.
func TestStreamedWriteDoesNotAsk(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, policy)
			p.faultyUpstream.Hold(faulty.Missing)
			c := streamsTo(t, p.Instance)
			for i := range 10 {
				d, err := stream(t.Context(), c, fmt.Append(nil, i))
				if err != nil || !has(t, p.local, d) {
					t.Fatalf("write %d: %v", i, err)
				}
			}
			p.drain(t)
			if n := p.faultyUpstream.Calls(faulty.Missing); n > 0 || p.upstream.Len() != 10 {
				t.Errorf("got %d questions and %d of 10 blobs in the upstream", n, p.upstream.Len())
			}
		})
	}
}

// A slowStore answers like a bucket: each blob takes one call, and up to 32 calls run at once.
type slowStore struct {
	cas.Store
	perCall time.Duration
}

func (s slowStore) wait(n int) { time.Sleep(time.Duration((n+31)/32) * s.perCall) }

func (s slowStore) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	s.wait(1)
	return s.Store.Put(ctx, d, r)
}

func (s slowStore) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	s.wait(len(blobs))
	return cas.PutAll(ctx, s.Store, blobs)
}

func (s slowStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.wait(len(ds))
	return s.Store.Missing(ctx, ds)
}

// benchDisk returns instances of a new disk store.
func benchDisk(b *testing.B) cas.Instances {
	c, err := disk.Open(disk.Config{Dir: b.TempDir(), MaxBytes: 4 << 30})
	must(b, err)
	b.Cleanup(func() { c.Close() })
	return c.Instance
}

// BenchmarkStreamedWrites compares streamed writes of 1 KiB without an upstream to those in front of a slow one.
func BenchmarkStreamedWrites(b *testing.B) {
	front := func(policy overlay.Policy) func(*testing.B) cas.Instances {
		return func(b *testing.B) cas.Instances {
			upstream := slowStore{castest.NewMemory(), 7 * time.Millisecond}
			return open(b, overlay.Config{Local: benchDisk(b), Upstream: one(upstream, nil), Policy: policy}).Instance
		}
	}
	for _, store := range []struct {
		name string
		open func(*testing.B) cas.Instances
	}{{"none", benchDisk}, {"back", front(overlay.WriteBack)}, {"through", front(overlay.WriteThrough)}} {
		b.Run(store.name, func(b *testing.B) {
			c := streamsTo(b, store.open(b))
			var n atomic.Uint64
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					data := make([]byte, 1<<10)
					binary.LittleEndian.PutUint64(data, n.Add(1))
					if _, err := stream(b.Context(), c, data); err != nil {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "writes/s")
		})
	}
}

// BenchmarkStreamedReads compares streamed reads of 1 KiB without an upstream to those in front of one that has all blobs.
func BenchmarkStreamedReads(b *testing.B) {
	const blobs = 2000
	front := func(b *testing.B) cas.Instances {
		upstream := castest.NewMemory()
		return open(b, overlay.Config{Local: benchDisk(b), Upstream: one(upstream, nil), Policy: overlay.WriteBack}).Instance
	}
	for _, store := range []struct {
		name string
		open func(*testing.B) cas.Instances
	}{{"none", benchDisk}, {"back", front}} {
		b.Run(store.name, func(b *testing.B) {
			instances := store.open(b)
			in, err := instances("")
			must(b, err)
			var ds []cas.Digest
			for i := range blobs {
				d, err := cas.PutBytes(b.Context(), in.Store, cas.SHA256, binary.LittleEndian.AppendUint64(make([]byte, 1<<10), uint64(i)))
				must(b, err)
				ds = append(ds, d)
			}
			c := streamsTo(b, instances)
			var n atomic.Uint64
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					s, err := c.Read(b.Context(), &bspb.ReadRequest{ResourceName: ds[n.Add(1)%blobs].Resource()})
					for err == nil {
						_, err = s.Recv()
					}
					if err != io.EOF {
						b.Error(err)
					}
				}
			})
		})
	}
}

// BenchmarkBatches compares batches of 100 blobs of 1 KiB without an upstream to those in front of one that never answers,
// so that nothing is sent.
func BenchmarkBatches(b *testing.B) {
	frozen := func(b *testing.B) cas.Instances {
		upstream := faulty.New(castest.NewMemory(), nil)
		gate := upstream.Hold(faulty.PutAll)
		o := open(b, overlay.Config{Local: benchDisk(b), Upstream: one(upstream, nil), Policy: overlay.WriteBack})
		b.Cleanup(gate.Open)
		return o.Instance
	}
	for name, open := range map[string]func(*testing.B) cas.Instances{"none": benchDisk, "back": frozen} {
		in, err := open(b)("")
		must(b, err)
		var n uint64
		var batches [][]cas.Blob
		next := func() []cas.Blob {
			batch := make([]cas.Blob, 100)
			for i := range batch {
				n++
				data := binary.LittleEndian.AppendUint64(make([]byte, 1<<10), n)
				batch[i] = cas.Blob{Digest: cas.SHA256.Sum(data), Data: data}
			}
			return batch
		}
		b.Run(name+"/write", func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				batches = append(batches, next())
				b.StartTimer()
				must(b, errors.Join(cas.PutAll(b.Context(), in.Store, batches[len(batches)-1])...))
			}
		})
		b.Run(name+"/read", func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				batch := batches[i%len(batches)]
				ds := make([]cas.Digest, len(batch))
				for j := range batch {
					ds[j] = batch[j].Digest
				}
				must(b, cas.Fetch(b.Context(), in.Store, ds))
				for _, d := range ds {
					if _, err := cas.ReadAll(b.Context(), in.Store, d, 1<<20); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
