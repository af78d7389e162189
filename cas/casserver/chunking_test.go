// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/internal/chunk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

const (
	unknown = repb.ChunkingFunction_UNKNOWN
	fastCDC = repb.ChunkingFunction_FAST_CDC_2020
	repMax  = repb.ChunkingFunction_REP_MAX_CDC
)

// chunks returns all messages of GetChunkMapping.
func (c *client) chunks(ctx context.Context, req *repb.GetChunkMappingRequest) (all []*repb.GetChunkMappingResponse, err error) {
	stream, err := c.GetChunkMapping(ctx, req)
	for err == nil {
		var m *repb.GetChunkMappingResponse
		if m, err = stream.Recv(); err == nil {
			all = append(all, m)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return all, err
}

// register sends messages and returns the result.
func (c *client) register(ctx context.Context, messages ...*repb.RegisterChunkMappingRequest) error {
	stream, err := c.RegisterChunkMapping(ctx)
	if err != nil {
		return err
	}
	for _, m := range messages {
		if err := stream.Send(m); err != nil {
			break // the server has answered
		}
	}
	resp, err := stream.CloseAndRecv()
	if err == nil && len(messages) > 0 && !proto.Equal(resp.BlobDigest, messages[0].BlobDigest) {
		err = fmt.Errorf("registered is %v, not %v", resp.BlobDigest, messages[0].BlobDigest)
	}
	return err
}

// splitters returns both RPCs that split blobs.
func (c *client) splitters() map[string]func(d cas.Digest, v repb.ChunkingFunction_Value) ([]*repb.Digest, repb.ChunkingFunction_Value, error) {
	ctx := context.Background()
	return map[string]func(d cas.Digest, v repb.ChunkingFunction_Value) ([]*repb.Digest, repb.ChunkingFunction_Value, error){
		"SplitBlob": func(d cas.Digest, v repb.ChunkingFunction_Value) ([]*repb.Digest, repb.ChunkingFunction_Value, error) {
			r, err := c.SplitBlob(ctx, &repb.SplitBlobRequest{BlobDigest: d.Proto(), ChunkingFunction: v})
			return r.GetChunkDigests(), r.GetChunkingFunction(), err
		},
		"GetChunkMapping": func(d cas.Digest, v repb.ChunkingFunction_Value) (all []*repb.Digest, by repb.ChunkingFunction_Value, err error) {
			ms, err := c.chunks(ctx, &repb.GetChunkMappingRequest{BlobDigest: d.Proto(), ChunkingFunction: v})
			for _, m := range ms {
				all = append(all, m.ChunkDigests...)
			}
			if len(ms) > 0 {
				by = ms[0].ChunkingFunction
			}
			return all, by, err
		},
	}
}

// splicers returns both RPCs that splice blobs.
func (c *client) splicers() map[string]func(d cas.Digest, v repb.ChunkingFunction_Value, chunks ...*repb.Digest) error {
	ctx := context.Background()
	return map[string]func(d cas.Digest, v repb.ChunkingFunction_Value, chunks ...*repb.Digest) error{
		"SpliceBlob": func(d cas.Digest, v repb.ChunkingFunction_Value, chunks ...*repb.Digest) error {
			r, err := c.SpliceBlob(ctx, &repb.SpliceBlobRequest{BlobDigest: d.Proto(), ChunkingFunction: v, ChunkDigests: chunks})
			if err == nil && !proto.Equal(r.BlobDigest, d.Proto()) {
				err = fmt.Errorf("spliced is %v", r.BlobDigest)
			}
			return err
		},
		"RegisterChunkMapping": func(d cas.Digest, v repb.ChunkingFunction_Value, chunks ...*repb.Digest) error {
			ms := []*repb.RegisterChunkMappingRequest{{BlobDigest: d.Proto(), ChunkingFunction: v}}
			for part := range slices.Chunk(chunks, 2) {
				ms = append(ms, &repb.RegisterChunkMappingRequest{ChunkDigests: part}, &repb.RegisterChunkMappingRequest{})
			}
			return c.register(ctx, ms...)
		},
	}
}

// cut stores the chunks of data and returns their digests.
func cut(t testing.TB, s cas.Store, data string, p chunk.Params) (ds []*repb.Digest) {
	t.Helper()
	r := must.Get(chunk.NewReader(strings.NewReader(data), p))(t)
	for {
		b, err := r.Next()
		if err == io.EOF {
			return ds
		} else if err != nil {
			t.Fatal(err)
		}
		d := cas.SHA256.Sum(b)
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
		ds = append(ds, d.Proto())
	}
}

func wantDigests(t *testing.T, got, want []*repb.Digest) {
	t.Helper()
	expect.That(t, slices.EqualFunc(got, want, func(a, b *repb.Digest) bool { return proto.Equal(a, b) }),
		"got %d chunks %v, want %d %v", len(got), got, len(want), want)
}

// A plain store does not support chunks.
type plain struct{ cas.Store }

func TestRule013_ChunkingIsAdvertisedIfSupported(t *testing.T) {
	instances := castest.Instances()
	c := serve(t, casserver.Config{Instances: func(name string) (*cas.Instance, error) {
		in, err := instances(name)
		if name == "plain" {
			in.Store = plain{in.Store}
		}
		return in, err
	}})
	for _, name := range []string{"", "plain"} {
		served := name == ""
		r := must.Get(c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{InstanceName: name}))(t)
		caps := r.CacheCapabilities
		if caps.SplitBlobSupport != served || caps.SpliceBlobSupport != served ||
			(caps.FastCdc_2020Params != nil) != served || (caps.RepMaxCdcParams != nil) != served {
			t.Errorf("instance %q: got %v", name, caps)
		}
		for _, call := range c.calls() {
			if !strings.Contains(call.name, "Split") && !strings.Contains(call.name, "Splice") && !strings.Contains(call.name, "ChunkMapping") {
				continue
			}
			want := codes.NotFound
			if !served {
				want = codes.Unimplemented
			}
			wantCode(t, call.do(t.Context(), target{instance: name, digest: sum("absent").Proto()}), want)
		}
	}
}

func TestRule057_ChunksAreStoredAndMakeUpTheBlob(t *testing.T) {
	t.Parallel()
	data := noise(7 << 20)
	d := sum(data)
	for asked, cutBy := range map[repb.ChunkingFunction_Value]repb.ChunkingFunction_Value{unknown: fastCDC, fastCDC: fastCDC, repMax: repMax, 77: fastCDC} {
		c := serve(t, casserver.Config{})
		for name, split := range c.splitters() {
			t.Run(fmt.Sprint(name, asked), func(t *testing.T) {
				if _, _, err := split(sum("absent"), asked); true {
					wantCode(t, err, codes.NotFound, sum("absent").Hash())
				}
				if _, _, err := split(cas.SHA256.Sum([]byte(data+"x")), asked); true {
					wantCode(t, err, codes.NotFound)
				}
				c.put(t, data)
				got, by, err := split(d, asked)
				must.Be(t, err == nil && by == cutBy, "got %v, %v, want %v", by, err, cutBy)
				var p chunk.Params = chunk.FastCDC{Average: 512 << 10}
				if cutBy == repMax {
					p = chunk.RepMaxCDC{Min: 256 << 10, Horizon: 2 << 20}
				}
				wantDigests(t, got, cut(t, castest.NewMemory(), data, p))
				var all []byte
				for _, p := range got {
					chunk := must.Get(cas.FromProto(cas.SHA256, p))(t)
					b := must.Get(cas.ReadAll(t.Context(), c.memory(t, ""), chunk, chunk.Size()))(t)
					all = append(all, b...)
				}
				expect.That(t, string(all) == data, "got chunks of %d other bytes", len(all))
				// The chunks suffice without the blob, but not if one of them is missing.
				c.memory(t, "").Delete(d)
				if again, _, err := split(d, asked); err != nil {
					t.Error(err)
				} else {
					wantDigests(t, again, got)
				}
				first, _ := cas.FromProto(cas.SHA256, got[0])
				c.memory(t, "").Delete(first)
				_, _, err = split(d, asked)
				wantCode(t, err, codes.NotFound, d.Hash())
				c.put(t, data)
				if again, _, err := split(d, asked); err != nil || !c.has(t, first) {
					t.Errorf("the missing chunk was not recreated: %v", err)
				} else {
					wantDigests(t, again, got)
				}
			})
		}
	}
}

// A marking store records which blobs were marked as used.
type marking struct {
	*castest.Memory
	marked map[cas.Digest]bool
	err    error // returned by Splice
}

func (m *marking) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	for _, d := range ds {
		m.marked[d] = true
	}
	return m.Memory.Missing(ctx, ds)
}

func (m *marking) Splice(ctx context.Context, d cas.Digest, of cas.ChunkList) error {
	if m.err != nil {
		return m.err
	}
	return m.Memory.Splice(ctx, d, of)
}

func serveMarking(t *testing.T) (*client, *marking) {
	m := &marking{castest.NewMemory(), map[cas.Digest]bool{}, nil}
	return serve(t, casserver.Config{Instances: instances(m, m)}), m
}

func TestRule057_SplitMarksBlobAndChunksAsUsed(t *testing.T) {
	c, m := serveMarking(t)
	b, d, of := castest.PutChunks(t, m, 1, 1<<20, 2<<20)
	must.Succeed(t, m.Splice(t.Context(), d, of))
	_, small := castest.Blob(9, 100)
	_ = m.Put(t.Context(), small, bytes.NewReader(b[:0]))
	for name, split := range c.splitters() {
		clear(m.marked)
		if _, _, err := split(d, unknown); err != nil {
			t.Fatal(err)
		}
		for _, want := range append(slices.Clone(of.Chunks), d) {
			expect.That(t, m.marked[want], "%s: %s was not marked as used", name, want)
		}
	}
}

func TestRule058_SmallBlobIsItsOnlyChunk(t *testing.T) {
	t.Parallel()
	for v, most := range map[repb.ChunkingFunction_Value]int{unknown: 2 << 20, fastCDC: 2 << 20, repMax: 512<<10 - 1} {
		c := serve(t, casserver.Config{})
		for name, split := range c.splitters() {
			for _, size := range []int{1, most} {
				d := c.put(t, noise(size))
				got, _, err := split(d, v)
				must.Succeed(t, err)
				wantDigests(t, got, []*repb.Digest{d.Proto()})
			}
			d := c.put(t, noise(most+1))
			if got, _, err := split(d, v); err != nil || len(got) < 2 {
				t.Errorf("%s, %v: a blob of %d bytes has %d chunks, %v", name, v, most+1, len(got), err)
			}
			if got, _, err := split(sum(""), v); err != nil || len(got) != 0 {
				t.Errorf("%s, %v: the empty blob has chunks %v, %v", name, v, got, err)
			}
		}
	}
}

func TestRule060_SpliceVerifies(t *testing.T) {
	t.Parallel()
	large := noise(3 << 20)
	for name := range (&client{}).splicers() {
		for kind, data := range map[string]string{"small": large[:100_000], "large": large} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				c, m := serveMarking(t)
				splice := c.splicers()[name]
				d := sum(data)
				half := len(data) / 2
				a, b := sum(data[:half]).Proto(), sum(data[half:]).Proto()
				put := func(data string) {
					must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(data)))(t)
				}
				put(data[:half])
				wantCode(t, splice(d, unknown, a, b), codes.NotFound, b.Hash, d.Hash())
				put(data[half:])
				before := m.Digests()
				wantCode(t, splice(d, unknown, b, a), codes.InvalidArgument, d.Hash())
				wantCode(t, splice(d, fastCDC, b, a), codes.InvalidArgument, d.Hash())
				wantCode(t, splice(d, repMax, b, a), codes.InvalidArgument, d.Hash())
				wantCode(t, splice(d, unknown, a), codes.InvalidArgument, "of its")
				wantCode(t, splice(d, unknown), codes.InvalidArgument, "0 of its")
				wantCode(t, splice(d, unknown, a, b, a), codes.InvalidArgument, "larger than the blob")
				if got := m.Digests(); !slices.Equal(got, before) || has(t, m, d) {
					t.Errorf("got stored blobs, want none")
				}
				expect.Error(t, expect.Err(m.Split(t.Context(), d)), cas.ErrNotFound)
				if kind == "large" {
					m.err = cas.ErrFull
					wantCode(t, splice(d, unknown, a, b), codes.ResourceExhausted, d.Hash())
					m.err = nil
				}
				empty := cas.SHA256.Sum(nil).Proto()
				wantCode(t, splice(d, unknown, empty, a, empty, b), codes.OK)
				if got, err := cas.ReadAll(t.Context(), m, d, d.Size()); err != nil || string(got) != data {
					t.Errorf("got %d other bytes, %v", len(got), err)
				}
				expect.Equal(t, slices.Contains(m.Digests(), d), kind == "small", "stored as a whole")
				// A present blob remains unchanged and is marked as used.
				clear(m.marked)
				wantCode(t, splice(d, unknown, b, a), codes.OK)
				expect.That(t, m.marked[d], "the blob was not marked as used")
				wantCode(t, splice(cas.SHA256.Sum(nil), unknown), codes.OK)
			})
		}
	}
}

func has(t *testing.T, s cas.Store, d cas.Digest) bool {
	t.Helper()
	missing := must.Get(s.Missing(t.Context(), []cas.Digest{d}))(t)
	return len(missing) == 0
}

func TestRule060_StatedFunctionIsRecordedIfCorrect(t *testing.T) {
	t.Parallel()
	data := noise(5 << 20)
	fast, max := chunk.FastCDC{Average: 512 << 10}, chunk.RepMaxCDC{Min: 256 << 10, Horizon: 2 << 20}
	for _, x := range []struct {
		name   string
		cut    chunk.Params
		stated repb.ChunkingFunction_Value
		want   repb.ChunkingFunction_Value
	}{
		{"FastCDC", fast, fastCDC, fastCDC},
		{"RepMaxCDC", max, repMax, repMax},
		{"NotFastCDC", max, fastCDC, unknown},
		{"NotRepMaxCDC", fast, repMax, unknown},
		{"OtherParameters", chunk.FastCDC{Average: 256 << 10}, fastCDC, unknown},
		{"OtherSeed", chunk.FastCDC{Average: 512 << 10, Seed: 666}, fastCDC, unknown},
		{"Unknown", fast, unknown, unknown},
		{"NotServed", fast, 77, unknown},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := serve(t, casserver.Config{})
			for name, splice := range c.splicers() {
				m := c.memory(t, "")
				d := sum(data)
				wantCode(t, splice(d, x.stated, cut(t, m, data, x.cut)...), codes.OK)
				if got, err := m.Split(t.Context(), d); err != nil || got.Function != x.want {
					t.Errorf("%s: noted is %v, %v, want %v", name, got.Function, err, x.want)
				}
			}
		})
	}
}

// A client may name up to a million chunks, which take little more memory than the list.
func TestRegisterChunkMappingIsLimited(t *testing.T) {
	t.Parallel()
	c := serve(t, casserver.Config{})
	piece := c.put(t, "0123456789").Proto()
	part := &repb.RegisterChunkMappingRequest{ChunkDigests: slices.Repeat([]*repb.Digest{piece}, 50_000)}
	messages := slices.Repeat([]*repb.RegisterChunkMappingRequest{part}, 21)
	huge := must.Get(cas.NewDigest(cas.SHA256, sum("huge").Hash(), 1<<50))(t)
	first := &repb.RegisterChunkMappingRequest{BlobDigest: huge.Proto()}
	wantCode(t, c.register(t.Context(), append([]*repb.RegisterChunkMappingRequest{first}, messages...)...),
		codes.InvalidArgument, "more than 1000000 chunks")

	h := cas.SHA256.New(10_000_000)
	for range 1_000_000 {
		h.Write([]byte("0123456789"))
	}
	d := cas.SHA256.Digest(h, 10_000_000)
	first.BlobDigest = d.Proto()
	if err := c.register(t.Context(), append([]*repb.RegisterChunkMappingRequest{first}, messages[:20]...)...); err != nil || !c.has(t, d) {
		t.Errorf("a million chunks: %v", err)
	}
}

// Only a few blobs are split at once, and fewer for one caller, whose waiting calls do not delay other callers. A
// waiting call that is cancelled ends immediately, on the server as well.
func TestConcurrentSplitsAreLimited(t *testing.T) {
	t.Parallel()
	data := noise(3 << 20)
	m := faulty.New(castest.NewMemory(), nil)
	s := &mappingFaulty{m, castest.NewMemory()}
	c := serveWith(t, casserver.Config{Instances: instances(s, nil)}, callers()...)
	must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, []byte(data)))(t)
	gate := m.Hold(faulty.Open)
	const of, atOnce, atOnceForOne, each = 5, 16, 12, 20
	done := make(chan error, of*each)
	split := func(caller string) {
		_, err := c.chunks(as(t.Context(), caller), &repb.GetChunkMappingRequest{BlobDigest: sum(data).Proto()})
		done <- err
	}
	await := func(callers, calls int) {
		t.Helper()
		c.await(t, casserver.Chunking, callers, calls)
	}
	// cancelled starts one more call of caller and cancels it while it waits. callers is the number of callers that have
	// other calls in progress.
	cancelled := func(caller, callers int) {
		t.Helper()
		await(callers, callers*each)
		ctx, cancel := context.WithCancel(as(t.Context(), fmt.Sprint(caller)))
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			_, err := c.chunks(ctx, &repb.GetChunkMappingRequest{BlobDigest: sum(data).Proto()})
			ended <- err
		}()
		await(max(callers, caller+1), callers*each+1)
		cancel()
		wantCode(t, <-ended, codes.Canceled)
		await(callers, callers*each)
	}
	for caller := range of {
		for range each {
			go split(fmt.Sprint(caller))
		}
		for range min(atOnceForOne, atOnce-m.Calls(faulty.Open)) {
			gate.Arrived()
		}
		cancelled(caller, caller+1)
		expect.Equal(t, m.Calls(faulty.Open), min(atOnce, (caller+1)*atOnceForOne), "blobs are read at once")
	}
	cancelled(of, of) // this call waits for other callers only
	expect.Equal(t, m.Calls(faulty.Open), atOnce, "blobs are read at once")
	gate.Open()
	for range of * each {
		expect.Error(t, <-done, nil)
	}
}

// A mappingFaulty keeps chunk lists separately from the blobs.
type mappingFaulty struct {
	*faulty.Store
	lists *castest.Memory
}

func (m *mappingFaulty) Splice(context.Context, cas.Digest, cas.ChunkList) error { return nil }

func (m *mappingFaulty) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	return m.lists.Split(ctx, d)
}

// Two similar blobs take little more space than one.
func TestSplicedBlobsShareChunks(t *testing.T) {
	t.Parallel()
	// Maintenance, which writes to the store every half minute, does not run meanwhile.
	synctest.Test(t, func(t *testing.T) {
		store := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 20}))(t)
		defer store.Close()
		c := serve(t, casserver.Config{Instances: store.Instance})
		in := must.Get(store.Instance(""))(t)
		one := noise(20 << 20)
		other := one[:9<<20] + "eleven more" + one[9<<20:]
		var before int64
		for i, data := range []string{one, other} {
			p := chunk.FastCDC{Average: 512 << 10}
			must.Succeed(t, c.register(t.Context(), &repb.RegisterChunkMappingRequest{
				BlobDigest: sum(data).Proto(), ChunkingFunction: fastCDC, ChunkDigests: cut(t, in.Store, data, p),
			}))
			now := store.Stats().Bytes
			if most := int64(3 << 20); i == 1 && now-before > most {
				t.Errorf("the second blob takes %d bytes more, want at most %d", now-before, most)
			}
			before = now
			if got, err := cas.ReadAll(t.Context(), in.Store, sum(data), 32<<20); err != nil || string(got) != data {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			for name, split := range c.splitters() {
				if got, by, err := split(sum(data), repMax); err != nil || by != fastCDC {
					t.Errorf("%s: %d chunks, %v, %v", name, len(got), by, err)
				}
			}
			expect.That(t, now == store.Stats().Bytes, "splitting a blob stored as chunks took more space")
		}
		expect.Error(t, store.Check(t.Context()), nil)
	})
}

func TestCancelledRegisterStoresNothing(t *testing.T) {
	c := serve(t, casserver.Config{})
	a := c.put(t, "0123456789")
	d := sum("01234567890123456789")
	ctx, cancel := context.WithCancel(t.Context())
	stream := must.Get(c.RegisterChunkMapping(ctx))(t)
	must.Succeed(t, stream.Send(&repb.RegisterChunkMappingRequest{BlobDigest: d.Proto(), ChunkDigests: []*repb.Digest{a.Proto(), a.Proto()}}))
	cancel()
	expect.That(t, stream.RecvMsg(new(repb.RegisterChunkMappingResponse)) != nil, "got no error")
	expect.That(t, !c.has(t, d), "the blob is present")
}

// FuzzRegisterChunkMapping checks that registering chunks succeeds, and makes the blob present, exactly if the blob is
// their concatenation.
func FuzzRegisterChunkMapping(f *testing.F) {
	m := castest.NewMemory()
	c := serveFuzz(f, m)
	var chunks []cas.Digest
	var datas []string
	for i := range 8 {
		data := noise(1 << (3 * i))
		d := must.Get(cas.PutBytes(context.Background(), m, cas.SHA256, []byte(data)))(f)
		chunks, datas = append(chunks, d), append(datas, data)
	}
	f.Add([]byte{1, 2, 3}, []byte{1, 2, 3}, int32(0), byte(0))
	f.Add([]byte{7, 7}, []byte{7, 7}, int32(1), byte(2))
	f.Add([]byte{9, 0, 200}, []byte{1}, int32(2), byte(0))
	f.Fuzz(func(t *testing.T, list, blob []byte, function int32, odd byte) {
		list, blob = list[:min(len(list), 12)], blob[:min(len(blob), 12)]
		var want, got strings.Builder
		for _, i := range blob {
			want.WriteString(datas[i%8])
		}
		d := sum(want.String())
		req := &repb.RegisterChunkMappingRequest{BlobDigest: d.Proto(), ChunkingFunction: repb.ChunkingFunction_Value(function)}
		good := true
		for _, i := range list {
			p := chunks[i%8].Proto()
			switch i / 8 {
			case 20:
				p.SizeBytes += int64(odd)
				good = good && odd == 0
			case 21:
				p.Hash = strings.ToUpper(p.Hash)
				good = false
			case 22:
				p = nil
				good = false
			}
			got.WriteString(datas[i%8])
			req.ChunkDigests = append(req.ChunkDigests, p)
		}
		stored := slices.Contains(chunks, d) || d.IsEmpty()
		err := c.register(t.Context(), req)
		if good = good && got.String() == want.String(); stored {
			good = true
		}
		expect.That(t, (err == nil) == good, "register: %v, want success %v", err, good)
		expect.That(t, has(t, m, d) == good, "present: got %v, want %v", !good, good)
		if good {
			if b, err := cas.ReadAll(t.Context(), m, d, d.Size()); err != nil || string(b) != want.String() {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		}
		if !stored {
			m.Store.Delete(d)
		}
	})
}

// serveFuzz is serve for a fuzz target and one store.
func serveFuzz(f *testing.F, m *castest.Memory) *client {
	f.Helper()
	return serveWith(f, casserver.Config{Instances: instances(m, m)}, casserver.ServerOptions(nil)...)
}

// A million chunks of three bytes would need a list twelve times the size of the blob, read at each existence check.
func TestBlobOfTinyChunksIsStoredWhole(t *testing.T) {
	t.Parallel()
	store := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 20}))(t)
	defer store.Close()
	c := serve(t, casserver.Config{Instances: store.Instance})
	in := must.Get(store.Instance(""))(t)
	piece := must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("abc")))(t)
	const n, message = 1_000_000, 100_000
	blob := strings.Repeat("abc", n)
	first := &repb.RegisterChunkMappingRequest{BlobDigest: sum(blob).Proto()}
	messages := []*repb.RegisterChunkMappingRequest{first}
	for range n / message {
		messages = append(messages, &repb.RegisterChunkMappingRequest{ChunkDigests: slices.Repeat([]*repb.Digest{piece.Proto()}, message)})
	}
	must.Succeed(t, c.register(t.Context(), messages...))
	if got := store.Stats().Bytes; got > 4<<20 {
		t.Errorf("a blob of %d bytes takes %d bytes of the store, want at most 4 MiB", len(blob), got)
	}
	if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(blob).Resource()}); err != nil || string(got) != blob {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
	expect.Error(t, expect.Err(in.Store.(cas.Splicer).Split(t.Context(), sum(blob))), cas.ErrNotFound)
	expect.Error(t, store.Check(t.Context()), nil)
}
