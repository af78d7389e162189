// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// uploadForms upload data as the blob d without a digest function.
var uploadForms = map[string]func(*testing.T, *client, cas.Digest, string) error{
	"batch": func(t *testing.T, c *client, d cas.Digest, data string) error {
		r, err := c.BatchUpdateBlobs(t.Context(), &repb.BatchUpdateBlobsRequest{
			Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d.Proto(), Data: []byte(data)}},
		})
		if err != nil {
			return err
		}
		return status.FromProto(r.Responses[0].Status).Err()
	},
	"one message": func(t *testing.T, c *client, d cas.Digest, data string) error {
		_, err := c.write(t.Context(), message(unstatedName("blobs", d), 0, data, true))
		return err
	},
	"several messages": func(t *testing.T, c *client, d cas.Digest, data string) error {
		_, err := c.write(t.Context(), inPieces(unstatedName("blobs", d), data, max(len(data)/8, 1))...)
		return err
	},
	"compressed": func(t *testing.T, c *client, d cas.Digest, data string) error {
		by := repb.Compressor_ZSTD
		packed := pack(t, by, data)
		_, err := c.write(t.Context(), inPieces(unstatedName("compressed-blobs/"+compress.Name(by), d), packed, 3<<20)...)
		return err
	},
}

// inPieces returns an upload of data in messages of n bytes.
func inPieces(name, data string, n int) (ms []*bspb.WriteRequest) {
	for off := 0; ; off += n {
		end := min(off+n, len(data))
		ms = append(ms, message(name, int64(off), data[off:end], end == len(data)))
		if end == len(data) {
			return ms
		}
	}
}

func unstatedName(kind string, d cas.Digest) string {
	return fmt.Sprintf("uploads/u/%s/%s/%d", kind, d.Hash(), d.Size())
}

// A learner is a server's instance that records functions, and refuses some.
type learner struct {
	mu      sync.Mutex
	learned []cas.Function // guarded by mu
	refuses cas.Function
}

func (l *learner) report(_ context.Context, _ string, f cas.Function) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f == l.refuses {
		return fmt.Errorf("%w: refused", cas.ErrInvalid)
	}
	l.learned = append(l.learned, f)
	return nil
}

// serve serves an instance with the functions learned.
func (l *learner) serve(t *testing.T, store cas.Store, m *castest.Memory) *client {
	return serve(t, casserver.Config{Unstated: l.report, Instances: func(name string) (*cas.Instance, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		return &cas.Instance{Name: name, Store: store, Actions: m, Unstated: slices.Clone(l.learned)}, nil
	}})
}

// Rule 19: the content of an upload without a digest function decides between functions with hashes of equal length.
func TestContentDecidesTheFunction(t *testing.T) {
	for form, upload := range uploadForms {
		for _, f := range []cas.Function{cas.SHA256, cas.BLAKE3, cas.SHA256TREE, cas.SHA1, cas.GITSHA1} {
			t.Run(form+"/"+f.String(), func(t *testing.T) {
				m, l := castest.NewMemory(), &learner{}
				c := l.serve(t, m, m)
				for range 2 { // the second upload finds the function learned
					data := noise(5000 + len(m.Digests()))
					d := f.Sum([]byte(data))
					wantCode(t, upload(t, c, d, data), codes.OK)
					expect.That(t, slices.Contains(m.Digests(), d), "got blobs %v, want %v", m.Digests(), d)
					expect.Slices(t, l.learned, []cas.Function{f}, "functions learned")
				}
				expect.Equal(t, m.Len(), 2, "blobs")
			})
		}
	}
}

// A blob that is too large for memory also decides the function, and is stored once.
func TestLargeBlobDecidesTheFunction(t *testing.T) {
	data := noise(17 << 20)
	for _, form := range []string{"several messages", "compressed"} {
		for _, f := range []cas.Function{cas.SHA256, cas.BLAKE3, cas.SHA256TREE} {
			t.Run(fmt.Sprint(form, f), func(t *testing.T) {
				m, l := castest.NewMemory(), &learner{}
				c := l.serve(t, m, m)
				d := f.Sum([]byte(data))
				wantCode(t, uploadForms[form](t, c, d, data), codes.OK)
				expect.Slices(t, m.Digests(), []cas.Digest{d}, "blobs")
				expect.Slices(t, l.learned, []cas.Function{f}, "functions learned")
			})
		}
	}
}

// A large blob of a second client, with another function, is neither kept in memory nor written twice: the client sends
// it again once the function is known.
func TestLargeBlobOfASecondClient(t *testing.T) {
	data := noise(17 << 20)
	for _, form := range []string{"several messages", "compressed"} {
		t.Run(form, func(t *testing.T) {
			m, l := castest.NewMemory(), &learner{learned: []cas.Function{cas.BLAKE3}}
			c := l.serve(t, m, m)
			d := cas.SHA256.Sum([]byte(data))
			wantCode(t, uploadForms[form](t, c, d, data), codes.Unavailable, "send the blob again")
			expect.Equal(t, m.Len(), 0, "blobs")
			expect.Equal(t, l.learned[len(l.learned)-1], cas.SHA256, "last function learned")
			l.learned = []cas.Function{cas.SHA256}
			wantCode(t, uploadForms[form](t, c, d, data), codes.OK)
			expect.Slices(t, m.Digests(), []cas.Digest{d}, "blobs")
		})
	}
}

// Uploads whose functions are undecided do not exhaust the server's memory and store: beyond the limits, the client
// must send its blob again.
func TestUndecidedUploadsAreBounded(t *testing.T) {
	m, l := castest.NewMemory(), &learner{}
	c := l.serve(t, m, m)
	const size = 16 << 20
	silent := map[string]bspb.ByteStream_WriteClient{}
	begin := func(n int) {
		for range n {
			d := must.Get(cas.NewDigest(cas.SHA256, fmt.Sprintf("%064d", len(silent)), size))(t)
			name := unstatedName("blobs", d)
			silent[name] = c.open(t.Context(), t, message(name, 0, "a", false))
			c.waitKept(t, name, 1)
		}
	}
	upload := func() codes.Code {
		data := noise(5000)
		return status.Code(uploadForms["several messages"](t, c, cas.BLAKE3.Sum([]byte(data)), data))
	}
	begin(4)
	expect.Equal(t, upload(), codes.OK, "a blob of another function than the assumed one, without memory for it")
	l.learned = nil
	begin(16) // these are written once for each function
	expect.Equal(t, upload(), codes.Unavailable, "one more")
	l.learned = nil
	for name, s := range silent {
		must.Succeed(t, s.Send(message(name, 1, "", true))) // too early
		_, err := s.CloseAndRecv()
		wantCode(t, err, codes.InvalidArgument)
	}
	expect.Equal(t, upload(), codes.OK, "the same blob once the others have ended")
}

// Rule 19: a client that states SHA256 cannot state it in names. What another client of the instance uses hides none of
// its blobs.
func TestUnstatedReadsFindBlobsOfOtherFunctions(t *testing.T) {
	m, l := castest.NewMemory(), &learner{learned: []cas.Function{cas.BLAKE3}}
	c := l.serve(t, m, m)
	data := noise(5000)
	d := cas.SHA256.Sum([]byte(data))
	must.Succeed(t, m.Put(t.Context(), d, strings.NewReader(data)))
	if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: d.Resource()}); err != nil || string(got) != data {
		t.Errorf("got %d bytes, %v, want the blob", len(got), err)
	}
	if got, err := c.unpacked(t.Context(), repb.Compressor_ZSTD, d, 0); err != nil || got != data {
		t.Errorf("compressed: got %d bytes, %v, want the blob", len(got), err)
	}
	_, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: cas.SHA256.Sum([]byte("missing")).Resource()})
	wantCode(t, err, codes.NotFound)
}

func TestContentOfNoFunctionIsAMismatch(t *testing.T) {
	for form, upload := range uploadForms {
		for _, learned := range [][]cas.Function{nil, {cas.BLAKE3}} {
			t.Run(fmt.Sprint(form, learned), func(t *testing.T) {
				m, l := castest.NewMemory(), &learner{learned: learned}
				c := l.serve(t, m, m)
				wantCode(t, upload(t, c, sum("other"), "data!"), codes.InvalidArgument)
				expect.Equal(t, m.Len(), 0, "blobs")
				expect.Slices(t, l.learned, learned, "functions learned")
			})
		}
	}
}

// A client of another function than the learned one is refused, or the table decides otherwise.
func TestSecondFunctionIsReported(t *testing.T) {
	for form := range uploadForms {
		for _, refuses := range []cas.Function{cas.SHA256, 0} {
			t.Run(fmt.Sprint(form, refuses), func(t *testing.T) {
				m, l := castest.NewMemory(), &learner{learned: []cas.Function{cas.BLAKE3}, refuses: refuses}
				c := l.serve(t, m, m)
				data := noise(5000)
				err := uploadForms[form](t, c, sum(data), data)
				if refuses == 0 {
					wantCode(t, err, codes.OK)
					expect.That(t, slices.Contains(m.Digests(), sum(data)), "got blobs %v, want %v", m.Digests(), sum(data))
				} else {
					wantCode(t, err, codes.InvalidArgument, "refused")
				}
			})
		}
	}
}

// A stated function decides alone.
func TestStatedFunctionIsNotLearned(t *testing.T) {
	m, l := castest.NewMemory(), &learner{}
	c := l.serve(t, m, m)
	data := noise(5000)
	d := cas.BLAKE3.Sum([]byte(data))
	r, err := c.BatchUpdateBlobs(t.Context(), &repb.BatchUpdateBlobsRequest{
		DigestFunction: repb.DigestFunction_SHA256,
		Requests:       []*repb.BatchUpdateBlobsRequest_Request{{Digest: d.Proto(), Data: []byte(data)}},
	})
	wantCode(t, err, codes.OK)
	expect.Equal(t, codes.Code(r.Responses[0].Status.GetCode()), codes.InvalidArgument, "batch that states SHA256")
	_, err = c.write(t.Context(), message("uploads/u/"+d.Resource(), 0, data, true))
	wantCode(t, err, codes.OK)
	expect.Equal(t, len(l.learned), 0, "functions learned")
}

// failing is a store whose Put reads a byte and then fails or panics.
type failing struct {
	cas.Store
	err error // nil: panic
}

func (s failing) Put(_ context.Context, _ cas.Digest, r io.Reader) error {
	_, _ = r.Read(make([]byte, 1))
	if s.err == nil {
		panic("defect")
	}
	return s.err
}

func TestFailuresWhileTheFunctionIsUnknown(t *testing.T) {
	for form, upload := range uploadForms {
		for code, err := range map[codes.Code]error{codes.ResourceExhausted: cas.ErrFull, codes.Internal: nil} {
			t.Run(fmt.Sprint(form, code), func(t *testing.T) {
				m, l := castest.NewMemory(), &learner{}
				c := l.serve(t, failing{m, err}, m)
				data := noise(1 << 20)
				wantCode(t, upload(t, c, cas.BLAKE3.Sum([]byte(data)), data), code)
				expect.Equal(t, m.Len(), 0, "blobs")
			})
		}
	}
}

// failingFor fails for blobs of one function.
type failingFor struct {
	failing
	function cas.Function
}

func (s failingFor) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if d.Function() == s.function {
		return s.failing.Put(ctx, d, r)
	}
	return s.Store.Put(ctx, d, r)
}

// A failed put under one function fails the upload of a large blob only if the blob has that function. If the store was
// full, the client sends the blob again once the function is known.
func TestLargeBlobWithAPutThatFails(t *testing.T) {
	data := noise(17 << 20)
	for _, c := range []struct {
		fails, has cas.Function
		err        error
		want       codes.Code
	}{
		{cas.SHA256, cas.BLAKE3, cas.ErrUnwritable, codes.Unavailable}, // the assumed one: the rest is not read
		{cas.SHA256, cas.BLAKE3, cas.ErrFull, codes.OK},
		{cas.SHA256, cas.SHA256, cas.ErrFull, codes.Unavailable},
		{cas.BLAKE3, cas.BLAKE3, cas.ErrFull, codes.Unavailable},
		{cas.BLAKE3, cas.BLAKE3, cas.ErrUnwritable, codes.Unavailable},
		{cas.SHA256TREE, cas.BLAKE3, cas.ErrFull, codes.OK},
		{cas.SHA256, cas.BLAKE3, nil, codes.Internal},
		{cas.SHA256TREE, cas.BLAKE3, nil, codes.Internal}, // a panic is never ignored
	} {
		t.Run(fmt.Sprint(c.fails, c.has, c.err), func(t *testing.T) {
			m, l := castest.NewMemory(), &learner{}
			client := l.serve(t, failingFor{failing{m, c.err}, c.fails}, m)
			d := c.has.Sum([]byte(data))
			wantCode(t, uploadForms["several messages"](t, client, d, data), c.want)
			if c.err == cas.ErrFull {
				expect.Slices(t, l.learned, []cas.Function{c.has}, "functions learned")
			}
			if c.want == codes.OK {
				expect.Slices(t, m.Digests(), []cas.Digest{d}, "blobs")
			} else if c.err != nil {
				expect.Equal(t, m.Len(), 0, "blobs")
			}
		})
	}
}

// A narrow store has room for one Put at a time.
type narrow struct {
	cas.Store
	room chan struct{}
}

func (s narrow) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	select {
	case s.room <- struct{}{}:
		defer func() { <-s.room }()
		return s.Store.Put(ctx, d, r)
	default:
		return cas.ErrFull
	}
}

// A large blob for which the store has room only once is stored, at the latest when the client sends it again.
func TestLargeBlobFillsTheStore(t *testing.T) {
	data := noise(17 << 20)
	for f, want := range map[cas.Function]codes.Code{cas.SHA256: codes.OK, cas.BLAKE3: codes.Unavailable} {
		t.Run(f.String(), func(t *testing.T) {
			m, l := castest.NewMemory(), &learner{}
			client := l.serve(t, narrow{m, make(chan struct{}, 1)}, m)
			d := f.Sum([]byte(data))
			wantCode(t, uploadForms["several messages"](t, client, d, data), want)
			expect.Slices(t, l.learned, []cas.Function{f}, "functions learned")
			wantCode(t, uploadForms["several messages"](t, client, d, data), codes.OK)
			expect.Slices(t, m.Digests(), []cas.Digest{d}, "blobs")
		})
	}
}
