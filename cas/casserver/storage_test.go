// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// updates returns a request to store blobs.
func updates(blobs ...string) *repb.BatchUpdateBlobsRequest {
	req := &repb.BatchUpdateBlobsRequest{}
	for _, b := range blobs {
		req.Requests = append(req.Requests, &repb.BatchUpdateBlobsRequest_Request{Digest: sum(b).Proto(), Data: []byte(b)})
	}
	return req
}

// reads returns a request to read blobs.
func reads(blobs ...string) *repb.BatchReadBlobsRequest {
	req := &repb.BatchReadBlobsRequest{}
	for _, b := range blobs {
		req.Digests = append(req.Digests, sum(b).Proto())
	}
	return req
}

// update sends a batch and returns the code of each blob in order.
func (c *client) update(t *testing.T, req *repb.BatchUpdateBlobsRequest) []codes.Code {
	t.Helper()
	r := must.Get(c.BatchUpdateBlobs(t.Context(), req))(t)
	var got []codes.Code
	for i, r := range r.Responses {
		expect.That(t, proto.Equal(r.Digest, req.Requests[i].Digest),
			"response %d is of %v, want %v", i, r.Digest, req.Requests[i].Digest)
		got = append(got, codes.Code(r.Status.GetCode()))
	}
	return got
}

func TestRule024_FindMissingMarksBlobsAsUsed(t *testing.T) {
	var used []cas.Digest
	instances, m := behind(&probe{missing: func(ds []cas.Digest) { used = ds }})
	c := serve(t, casserver.Config{Instances: instances})
	d := must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte("have")))(t)
	must.Get(c.FindMissingBlobs(t.Context(), &repb.FindMissingBlobsRequest{BlobDigests: []*repb.Digest{d.Proto()}}))(t)
	expect.That(t, slices.Equal(used, []cas.Digest{d}), "got Missing of %v, want %v", used, d)
}

func TestRule026_MismatchIsInvalidAndNotStored(t *testing.T) {
	m := castest.NewMemory()
	c := serve(t, casserver.Config{Instances: instances(trusting{m}, m)})
	must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte("have")))(t)
	req := updates("a", "b", "have", "c")
	req.Requests[0].Data = []byte("x")
	req.Requests[1].Data = []byte("bb")
	req.Requests[2].Data = []byte("HAVE")
	r := must.Get(c.BatchUpdateBlobs(t.Context(), req))(t)
	for i, want := range []codes.Code{codes.InvalidArgument, codes.InvalidArgument, codes.InvalidArgument, codes.OK} {
		s := r.Responses[i].Status
		expect.That(t, codes.Code(s.GetCode()) == want, "blob %d: got %v, want %v", i, s, want)
		expect.That(t, want == codes.OK || strings.Contains(s.GetMessage(), req.Requests[i].Digest.Hash),
			"message %q does not name the blob", s.GetMessage())
	}
	expect.That(t, m.Len() == 2, "got blobs %v, want no mismatched one", m.Digests())
}

// A trusting store does not verify data for present blobs.
type trusting struct{ cas.Store }

func (s trusting) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if missing, err := s.Missing(ctx, []cas.Digest{d}); err != nil || len(missing) == 0 {
		return err
	}
	return s.Store.Put(ctx, d, r)
}

func TestRule027_CompressedBlobsCountWithStatedSizes(t *testing.T) {
	c := serve(t, casserver.Config{})
	req := packed(t, repb.Compressor_ZSTD, "a", "b")
	for _, size := range []int64{2_000_001, 1 << 62} {
		for _, r := range req.Requests {
			r.Digest.SizeBytes = size
		}
		_, err := c.BatchUpdateBlobs(t.Context(), req)
		wantCode(t, err, codes.InvalidArgument, "4000000", "ByteStream.Write")
	}
}

// packed returns a request to store compressed blobs.
func packed(t *testing.T, c repb.Compressor_Value, blobs ...string) *repb.BatchUpdateBlobsRequest {
	t.Helper()
	req := updates(blobs...)
	for _, r := range req.Requests {
		r.Data, r.Compressor = []byte(pack(t, c, string(r.Data))), c
	}
	return req
}

// A fetching store is remote and records which blobs are opened.
type fetching struct {
	cas.Store
	opened []cas.Digest
	absent []cas.Digest
	err    error
}

func (s *fetching) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	s.opened = append(s.opened, d)
	return s.Store.Open(ctx, d, off)
}

func (s *fetching) Fetch(context.Context, []cas.Digest) ([]cas.Digest, error) { return s.absent, s.err }

func TestRule031_AbsentBlobsAreFetchedOnce(t *testing.T) {
	m := castest.NewMemory()
	s := &fetching{Store: m, absent: []cas.Digest{sum("absent"), sum("absent too")}}
	c := serve(t, casserver.Config{Instances: instances(s, m)})
	must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte("here")))(t)
	for _, s.err = range []error{nil, cas.ErrUnavailable} {
		if s.err != nil {
			s.absent = nil
		}
		s.opened = nil
		r := must.Get(c.BatchReadBlobs(t.Context(), reads("absent", "here", "absent too", "absent")))(t)
		for i, want := range []codes.Code{codes.NotFound, codes.OK, codes.NotFound, codes.NotFound} {
			wantCode(t, status.ErrorProto(r.Responses[i].Status), want)
		}
		expect.Equal(t, len(s.opened), 1+3*(2-len(s.absent))/2, "opened blobs after Fetch with %v", s.err)
	}
}

// A localReading store is a fetching store that knows which blobs are local.
type localReading struct {
	fetching
	local   cas.Digest
	fetched []cas.Digest
}

func (s *localReading) Fetch(_ context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.fetched = append(s.fetched, ds...)
	return s.absent, nil
}

func (s *localReading) ReadLocal(ctx context.Context, ds []cas.Digest, limit int64) [][]byte {
	contents := make([][]byte, len(ds))
	for i, d := range ds {
		if d == s.local {
			contents[i], _ = cas.ReadAll(ctx, s.Store, d, limit)
		}
	}
	return contents
}

// TestLocalBlobsOfBatchAreNotFetched checks that a batch read fetches only those blobs that are not local.
func TestLocalBlobsOfBatchAreNotFetched(t *testing.T) {
	m := castest.NewMemory()
	s := &localReading{fetching: fetching{Store: m, absent: []cas.Digest{sum("absent")}}, local: sum("here")}
	c := serve(t, casserver.Config{Instances: instances(s, m)})
	for _, data := range []string{"here", "there"} {
		must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(data)))(t)
	}
	r := must.Get(c.BatchReadBlobs(t.Context(), reads("absent", "here", "there", "here")))(t)
	for i, want := range []string{"", "here", "there", "here"} {
		code := codes.OK
		if want == "" {
			code = codes.NotFound
		}
		wantCode(t, status.ErrorProto(r.Responses[i].Status), code)
		expect.Equal(t, string(r.Responses[i].Data), want, "blob %d", i)
	}
	expect.Slices(t, s.fetched, []cas.Digest{sum("absent"), sum("there")}, "fetched")
	expect.Slices(t, s.opened, []cas.Digest{sum("there")}, "opened")
}

// A masking store is a decorator that changes Open, and so implements Filer and Locator, too (see cas.As).
type masking struct {
	cas.Store
	cas.Filer
	cas.Locator
}

func (s masking) Unwrap() cas.Store { return s.Store }

func (s masking) Open(context.Context, cas.Digest, int64) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("mask")), nil
}

// TestBatchReadsDoNotBypassDecorators checks that local blobs are read through decorators that change Open.
func TestBatchReadsDoNotBypassDecorators(t *testing.T) {
	m := castest.NewMemory()
	local := &localReading{fetching: fetching{Store: m}, local: sum("here")}
	c := serve(t, casserver.Config{Instances: instances(masking{Store: local}, m)})
	must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte("here")))(t)
	r := must.Get(c.BatchReadBlobs(t.Context(), reads("here")))(t)
	expect.Equal(t, string(r.Responses[0].Data), "mask")
}

// A digest with a negative size is an error of its blob, and makes no room for others.
func TestRule032_NegativeSizeMakesNoRoom(t *testing.T) {
	c := serve(t, casserver.Config{})
	req := &repb.BatchReadBlobsRequest{Digests: []*repb.Digest{
		{Hash: sum("a").Hash(), SizeBytes: -1}, {Hash: sum("b").Hash(), SizeBytes: 4_000_000},
	}}
	_, err := c.BatchReadBlobs(t.Context(), req)
	wantCode(t, err, codes.OK)
	req.Digests[1].SizeBytes++
	_, err = c.BatchReadBlobs(t.Context(), req)
	wantCode(t, err, codes.InvalidArgument, "4000000")
}

// The stated sizes bound both the contents of a batch and its memory.
func TestRule029_BombsEndAtStatedSize(t *testing.T) {
	for _, by := range compress.Compressors() {
		c := serve(t, casserver.Config{})
		bomb := strings.Repeat("\x00", 256<<20)
		data := []byte(pack(t, by, bomb))
		must.Be(t, int64(len(data)) <= 4_000_000, "%v: a bomb of %d bytes", by, len(data))
		req := &repb.BatchUpdateBlobsRequest{Requests: []*repb.BatchUpdateBlobsRequest_Request{
			{Digest: &repb.Digest{Hash: sum("x").Hash(), SizeBytes: 1000}, Data: data, Compressor: by},
		}}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		expect.Slices(t, c.update(t, req), []codes.Code{codes.InvalidArgument}, "%v", by)
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
			t.Errorf("%v: took %d bytes of memory", by, n)
		}
		d := sum(bomb)
		req.Requests[0].Digest = d.Proto()
		_, err := c.BatchUpdateBlobs(t.Context(), req)
		wantCode(t, err, codes.InvalidArgument, "4000000", "ByteStream.Write")
		expect.That(t, c.memory(t, "").Len() == 0, "stored: %v", c.memory(t, "").Digests())
	}
}

func TestRule031_BatchReadHasStatusPerBlob(t *testing.T) {
	c := serve(t, casserver.Config{})
	c.put(t, "a")
	bad := c.put(t, "damaged")
	c.memory(t, "").Corrupt(bad)
	req := reads("a", "absent", "a", "damaged")
	req.Digests = append(req.Digests, &repb.Digest{Hash: "xyz"}, &repb.Digest{Hash: sum("a").Hash(), SizeBytes: -1})
	r := must.Get(c.BatchReadBlobs(t.Context(), req))(t)
	for i, want := range []struct {
		code codes.Code
		data string
	}{
		{codes.OK, "a"},
		{codes.NotFound, ""},
		{codes.OK, "a"},
		{codes.NotFound, ""},
		{codes.InvalidArgument, ""},
		{codes.InvalidArgument, ""},
	} {
		got := r.Responses[i]
		if codes.Code(got.Status.GetCode()) != want.code || string(got.Data) != want.data || !proto.Equal(got.Digest, req.Digests[i]) {
			t.Errorf("blob %d: got %v, want %v", i, got, want)
		}
	}
}

func TestRule032_BatchReadFitsIntoMessage(t *testing.T) {
	t.Parallel()
	c := serve(t, casserver.Config{})
	// The data alone would fit, but not the digests.
	var blobs []string
	for i := range 30_000 {
		blobs = append(blobs, fmt.Sprintf("%0130d", i))
		c.put(t, blobs[i])
	}
	r, err := c.BatchReadBlobs(t.Context(), reads(blobs...))
	wantCode(t, err, codes.OK)
	counts := map[codes.Code]int{}
	for i, r := range r.GetResponses() {
		code := codes.Code(r.Status.GetCode())
		counts[code]++
		if code == codes.OK && string(r.Data) != blobs[i] {
			t.Fatalf("blob %d is %q, want %q", i, r.Data, blobs[i])
		}
	}
	expect.That(t, counts[codes.OK] != 0 && counts[codes.ResourceExhausted] != 0 && len(counts) == 2,
		"got %v, want some OK and some RESOURCE_EXHAUSTED", counts)

	empty := slices.Repeat([]string{""}, 40_000)
	_, err = c.BatchReadBlobs(t.Context(), reads(empty...))
	wantCode(t, err, codes.InvalidArgument, "40000 digests")
	_, err = c.BatchUpdateBlobs(t.Context(), updates(empty...))
	wantCode(t, err, codes.InvalidArgument, "40000 digests")
	huge := &repb.Digest{Hash: sum("a").Hash(), SizeBytes: 1 << 62}
	_, err = c.BatchReadBlobs(t.Context(), &repb.BatchReadBlobsRequest{Digests: []*repb.Digest{huge, huge, huge, huge}})
	wantCode(t, err, codes.InvalidArgument, "ByteStream.Read")
}

// A batching store accepts only PutAll and records the batches.
type batching struct {
	cas.Store
	batches [][]cas.Blob
	fail    map[cas.Digest]error
}

func (b *batching) Put(context.Context, cas.Digest, io.Reader) error {
	return errors.New("Put instead of PutAll")
}

func (b *batching) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	b.batches = append(b.batches, blobs)
	errs := make([]error, len(blobs))
	for i, blob := range blobs {
		if errs[i] = b.fail[blob.Digest]; errs[i] == nil {
			errs[i] = b.Store.Put(ctx, blob.Digest, bytes.NewReader(blob.Data))
		}
	}
	return errs
}

// Rules 25, 26 and 28 for a store that accepts whole batches.
func TestBatchIsStoredByOneCall(t *testing.T) {
	m := castest.NewMemory()
	s := &batching{Store: m, fail: map[cas.Digest]error{
		sum("full"): fmt.Errorf("all is leased: %w", cas.ErrFull), sum("away"): cas.ErrUnavailable,
	}}
	c := serve(t, casserver.Config{
		MaxBlobBytes: 10,
		Instances:    instances(s, m),
	})
	req := updates("a", "compressed", "b", "wrong", "full", "longer than ten", "away", "a", "")
	req.Requests[1].Compressor = 99
	req.Requests[3].Data = []byte("WRONG")
	got := c.update(t, req)
	want := []codes.Code{
		codes.OK, codes.InvalidArgument, codes.OK, codes.InvalidArgument, codes.ResourceExhausted,
		codes.InvalidArgument, codes.Unavailable, codes.OK, codes.OK,
	}
	expect.Slices(t, got, want)
	expect.That(t, len(s.batches) == 1 && len(s.batches[0]) == 7, "got batches %v, want one of 7 blobs", s.batches)
	if missing, err := m.Missing(t.Context(), []cas.Digest{sum("a"), sum("b")}); err != nil || len(missing) > 0 || m.Len() != 2 {
		t.Errorf("got blobs %v, want a and b", m.Digests())
	}
	r, err := c.BatchUpdateBlobs(t.Context(), updates("full"))
	if text := r.GetResponses()[0].GetStatus().GetMessage(); err != nil || !strings.Contains(text, "all is leased") {
		t.Errorf("got %q, %v, want the store's own words", text, err)
	}
}

func TestRule033_BatchReadCompressesOnlyIfAcceptable(t *testing.T) {
	c := serve(t, casserver.Config{})
	small, text, random := "a", strings.Repeat("text ", 1000), noise(5000)
	for _, b := range []string{small, text, random} {
		c.put(t, b)
	}
	z, b, d := repb.Compressor_ZSTD, repb.Compressor_BROTLI, repb.Compressor_DEFLATE
	for _, row := range []struct {
		accepted []repb.Compressor_Value
		want     repb.Compressor_Value
	}{
		{nil, repb.Compressor_IDENTITY},
		{[]repb.Compressor_Value{repb.Compressor_IDENTITY}, repb.Compressor_IDENTITY},
		{[]repb.Compressor_Value{77}, repb.Compressor_IDENTITY},
		{[]repb.Compressor_Value{z}, z},
		{[]repb.Compressor_Value{d}, d},
		{[]repb.Compressor_Value{d, 77, b}, b},
		{[]repb.Compressor_Value{repb.Compressor_IDENTITY, b, z, d}, z},
	} {
		req := reads(small, text, random, "absent", "")
		req.AcceptableCompressors = row.accepted
		r, err := c.BatchReadBlobs(t.Context(), req)
		must.Succeed(t, err)
		for i, blob := range []string{small, text, random, "", ""} {
			got, want := r.Responses[i], repb.Compressor_IDENTITY
			if blob == text {
				want = row.want
			}
			data := got.Data
			if got.Compressor != repb.Compressor_IDENTITY {
				if data, err = compress.Decode(got.Compressor, data, int64(len(blob))); err != nil {
					t.Error(err)
				}
			}
			if got.Compressor != want || string(data) != blob || want != repb.Compressor_IDENTITY && len(got.Data) >= len(blob) {
				t.Errorf("accepted %v, blob %d: got %d bytes by %v, want %v", row.accepted, i, len(got.Data), got.Compressor, want)
			}
		}
		expect.Equal(t, codes.Code(r.Responses[3].Status.GetCode()), codes.NotFound, "absent")
	}
}

func TestRule033_LimitsCountUncompressedBytes(t *testing.T) {
	c := serve(t, casserver.Config{})
	blobs := []string{strings.Repeat("a", 2_000_000), strings.Repeat("b", 2_000_000), "c"}
	for _, b := range blobs {
		c.put(t, b)
	}
	for n, want := range map[int]codes.Code{2: codes.OK, 3: codes.InvalidArgument} {
		req := reads(blobs[:n]...)
		req.AcceptableCompressors = compress.Compressors()
		_, err := c.BatchReadBlobs(t.Context(), req)
		wantCode(t, err, want)
	}
}
