// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
)

// message returns a WriteRequest.
func message(name string, off int64, data string, finish bool) *bspb.WriteRequest {
	return &bspb.WriteRequest{ResourceName: name, WriteOffset: off, Data: []byte(data), FinishWrite: finish}
}

// uploadName returns the resource name of an upload of data.
func uploadName(data string) string { return "uploads/u/" + sum(data).Resource() }

// The client keeps its side open: the answer must not wait for it to close.
func TestFinishWriteIsAnsweredImmediately(t *testing.T) {
	c := serve(t, casserver.Config{})
	for name, row := range map[string]struct {
		messages []*bspb.WriteRequest
		want     codes.Code
	}{
		"with the last data":  {[]*bspb.WriteRequest{message(uploadName("a2"), 0, "a2", true)}, codes.OK},
		"after the last data": {[]*bspb.WriteRequest{message(uploadName("b2"), 0, "b2", false), message("", 2, "", true)}, codes.OK},
		"of the empty blob":   {[]*bspb.WriteRequest{message(uploadName(""), 0, "", true)}, codes.OK},
		"too early":           {[]*bspb.WriteRequest{message(uploadName("c2"), 0, "c", true)}, codes.InvalidArgument},
		"of other data":       {[]*bspb.WriteRequest{message(uploadName("d2"), 0, "d3", true)}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			stream := c.open(ctx, t, row.messages...)
			wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), row.want)
			expect.That(t, row.want != codes.OK || c.has(t, sum(blobOf(row.messages))), "the blob is not stored")
		})
	}
}

// blobOf returns the data of messages.
func blobOf(messages []*bspb.WriteRequest) string {
	var b strings.Builder
	for _, m := range messages {
		b.Write(m.Data)
	}
	return b.String()
}

func TestRule042_TooMuchDataIsRejectedImmediately(t *testing.T) {
	// This store reads on without limit and drops the reason for a failure.
	m := castest.NewMemory()
	c := serve(t, casserver.Config{Instances: instances(greedy{m}, m)})
	stream := c.open(t.Context(), t, message(uploadName("12345678"), 0, "123456789", false))
	// The client neither finishes nor closes: the answer must not wait for that.
	wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), codes.InvalidArgument, "longer than the 8 bytes")
	expect.Equal(t, m.Len(), 0, "blobs are stored")
}

// A greedy store reads to the end first and hides the errors of the reader.
type greedy struct{ cas.Store }

func (g greedy) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return errors.New("cannot read")
	}
	return g.Store.Put(ctx, d, bytes.NewReader(b))
}

func TestFullStoreErrorHasAdvice(t *testing.T) {
	leased := fmt.Errorf("all of its 9 bytes are leased for up to 2h59m: %w", cas.ErrFull)
	hint := func(l cas.Limit) string {
		return map[cas.Limit]string{cas.LimitBytes: "allow more bytes", cas.LimitFiles: "allow more files"}[l]
	}
	for _, test := range []struct {
		err  error
		want string
	}{
		{&cas.FullError{Limit: cas.LimitBytes, Err: leased}, "; upload again later; the operator can allow more bytes"},
		{&cas.FullError{Limit: cas.LimitFiles, Err: leased}, "; upload again later; the operator can allow more files"},
		{leased, "store is full; upload again later"}, // of an upstream
	} {
		instances, _ := behind(&probe{put: func(cas.Digest) error { return test.err }})
		c := serve(t, casserver.Config{Instances: instances, FullHint: hint})
		err := c.uploadTo(t.Context(), "", "data")
		wantCode(t, err, codes.ResourceExhausted, sum("data").String(), leased.Error(), test.want)
		expect.That(t, strings.HasSuffix(err.Error(), test.want), "got %v, want it to end with %q", err, test.want)
	}
}

func TestRule047_OneUploadNameForSeveralBlobs(t *testing.T) {
	c := serve(t, casserver.Config{})
	first := c.open(t.Context(), t, message(uploadName("12345678"), 0, "1234", false))
	wantCode(t, c.uploadTo(t.Context(), "", "another"), codes.OK)
	must.Succeed(t, first.Send(message("", 4, "5678", true)))
	if _, err := first.CloseAndRecv(); err != nil || !c.has(t, sum("12345678")) || !c.has(t, sum("another")) {
		t.Errorf("got %v, and %v are stored", err, c.memory(t, "").Digests())
	}
}

func TestReadOfCorruptBlobIsIncomplete(t *testing.T) {
	data := noise(2<<20 + 9)
	d := sum(data)
	for label, damage := range map[string]func(io.ReadCloser) io.Reader{
		"truncated":  func(r io.ReadCloser) io.Reader { return io.LimitReader(r, d.Size()-1) },
		"empty":      func(r io.ReadCloser) io.Reader { return strings.NewReader("") },
		"longer":     func(r io.ReadCloser) io.Reader { return io.MultiReader(r, strings.NewReader("x")) },
		"changed":    func(r io.ReadCloser) io.Reader { return cas.Verify(d, strings.NewReader("X"+data[1:])) },
		"unreadable": func(r io.ReadCloser) io.Reader { return io.MultiReader(io.LimitReader(r, 1<<20), broken{}) },
	} {
		t.Run(label, func(t *testing.T) {
			instances, m := behind(&probe{open: func(_ cas.Digest, r io.ReadCloser) io.ReadCloser {
				return struct {
					io.Reader
					io.Closer
				}{damage(r), r}
			}})
			c := serve(t, casserver.Config{Instances: instances})
			must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(data)))(t)
			want := codes.NotFound
			if label == "unreadable" {
				want = codes.Internal
			}
			for _, limit := range []int64{0, d.Size(), d.Size() + 1} {
				got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: d.Resource(), ReadLimit: limit})
				wantCode(t, err, want, d.String())
				expect.That(t, len(got) < len(data),
					"limit %d: got %d bytes, want fewer than %d", limit, len(got), len(data))
			}
			for _, by := range compress.Compressors() {
				b, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: compressedName(by, d)})
				wantCode(t, err, want, d.String())
				expect.That(t, expect.Err(compress.Decode(by, b, d.Size())) != nil, "%v: got a complete stream", by)
			}
		})
	}
}

// broken is a reader that fails.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("input/output error") }

// Buffers are reused by other calls and must not leak data between them.
func TestConcurrentStreamsDoNotShareData(t *testing.T) {
	t.Parallel()
	c := serve(t, casserver.Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for round := range 6 {
				size := []int{100, 20 << 10, 40 << 10, 300 << 10, 2<<20 + 5, 1<<20 - 11}[(i+round)%6]
				data := bytes.Repeat([]byte{byte(1 + i), byte(1 + round)}, size/2)
				text := string(data)
				name := uploadName(text)
				var messages []*bspb.WriteRequest
				for off := 0; off < len(data); off += 33 << 10 {
					end := min(off+33<<10, len(data))
					messages = append(messages, message(name, int64(off), text[off:end], end == len(data)))
				}
				if _, err := c.write(t.Context(), messages...); err != nil {
					t.Errorf("write: %v", err) // the store verifies the digest
				}
				if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(text).Resource()}); err != nil || !bytes.Equal(got, data) {
					t.Errorf("read gave %d other bytes, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
}

func TestStreamsWithDefaultCodec(t *testing.T) {
	c := serveWith(t, casserver.Config{})
	text := noise(3 << 20)
	if n, err := c.write(t.Context(), message(uploadName(text), 0, text[:100], false), message("", 100, text[100:], true)); err != nil || n != 3<<20 {
		t.Errorf("write: %d, %v", n, err)
	}
	if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(text).Resource()}); err != nil || string(got) != text {
		t.Errorf("read gave %d other bytes, %v", len(got), err)
	}
}
