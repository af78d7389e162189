// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/internal/compress"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

// message returns a WriteRequest.
func message(name string, off int64, data string, finish bool) *bspb.WriteRequest {
	return &bspb.WriteRequest{ResourceName: name, WriteOffset: off, Data: []byte(data), FinishWrite: finish}
}

// uploadName returns the resource name of an upload of data.
func uploadName(data string) string { return "uploads/u/" + sum(data).Resource() }

func TestRule036_TrailingMetadataOfAWriteIsIgnored(t *testing.T) {
	c := serve(t, casserver.Config{})
	for i, tail := range []string{"", "/", "/a", "/a/b/blobs/uploads/9"} {
		data := strings.Repeat("x", i+1)
		n, err := c.write(t.Context(), message(uploadName(data)+tail, 0, data, true))
		if err != nil || n != int64(len(data)) || !c.has(t, sum(data)) {
			t.Errorf("tail %q: got %d, %v", tail, n, err)
		}
	}
}

func TestRule037_NameMayBeOmittedButNotChanged(t *testing.T) {
	c := serve(t, casserver.Config{})
	for name, row := range map[string]struct {
		second string
		want   codes.Code
	}{
		"omitted":      {"", codes.OK},
		"same":         {uploadName("omitted or same"), codes.OK},
		"other upload": {"uploads/v/" + sum("omitted or same").Resource(), codes.InvalidArgument},
		"other blob":   {uploadName("x"), codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			data := "omitted or same"
			c.memory(t, "").Delete(sum(data))
			_, err := c.write(t.Context(), message(uploadName(data), 0, data[:4], false), message(row.second, 4, data[4:], true))
			wantCode(t, err, row.want)
			if got := c.has(t, sum(data)); got != (row.want == codes.OK) {
				t.Errorf("blob present: %v", got)
			}
		})
	}
	_, err := c.write(t.Context(), message("uploads//"+sum("data").Resource(), 0, "data", true))
	wantCode(t, err, codes.InvalidArgument)
	_, err = c.write(t.Context(), message("uploads/no uuid/"+sum("data").Resource(), 0, "data", true))
	wantCode(t, err, codes.OK)
	_, err = c.write(t.Context())
	wantCode(t, err, codes.InvalidArgument)
}

func TestRule038_OffsetsFollowTheData(t *testing.T) {
	c := serve(t, casserver.Config{})
	for name, offsets := range map[string][2]int64{
		"starts later":   {1, 5},
		"negative":       {-1, 3},
		"gap":            {0, 5},
		"overlap":        {0, 3},
		"not repeated":   {0, 0},
		"largest number": {0, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.write(t.Context(), message(uploadName("12345678"), offsets[0], "1234", false), message("", offsets[1], "5678", true))
			wantCode(t, err, codes.InvalidArgument, "write_offset", "start at offset 0")
			if c.has(t, sum("12345678")) {
				t.Error("the blob was stored")
			}
		})
	}
	n, err := c.write(t.Context(), message(uploadName("12345678"), 0, "1234", false), message("", 4, "", false), message("", 4, "5678", false), message("", 8, "", true))
	if err != nil || n != 8 {
		t.Errorf("got %d, %v, want 8", n, err)
	}
}

func TestRule039_NoCommitWithoutFinishWrite(t *testing.T) {
	c := serve(t, casserver.Config{})
	name := uploadName("12345678")
	for label, messages := range map[string][]*bspb.WriteRequest{
		"nothing finished":     {message(name, 0, "1234", false)},
		"all but not finished": {message(name, 0, "12345678", false)},
		"finished too early":   {message(name, 0, "1234", true)},
		"data after the end":   {message(name, 0, "1234", true), message(name, 4, "5678", true)},
	} {
		t.Run(label, func(t *testing.T) {
			_, err := c.write(t.Context(), messages...)
			wantCode(t, err, codes.InvalidArgument, sum("12345678").String())
			if c.memory(t, "").Len() != 0 {
				t.Errorf("stored: %v", c.memory(t, "").Digests())
			}
		})
	}
}

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
			if row.want == codes.OK && !c.has(t, sum(blobOf(row.messages))) {
				t.Error("the blob is not stored")
			}
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

func TestRule040_CommittedSizeIsTheSize(t *testing.T) {
	c := serve(t, casserver.Config{})
	for _, size := range []int{0, 1, 16 << 10, 3<<20 + 1} {
		data := noise(size)
		const piece = 16 << 10 // as Bazel sends
		name := uploadName(data)
		var messages []*bspb.WriteRequest
		for off := 0; off < size || off == 0; off += piece {
			end := min(off+piece, size)
			messages = append(messages, message(name, int64(off), data[off:end], end == size))
		}
		n, err := c.write(t.Context(), messages...)
		if err != nil || n != int64(size) {
			t.Errorf("got %d, %v, want %d", n, err, size)
		}
		if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(data).Resource()}); err != nil || string(got) != data {
			t.Errorf("read %d bytes back, %v, want %d", len(got), err, size)
		}
	}
}

func TestRule041_PresentBlobEndsUploadEarly(t *testing.T) {
	c := serve(t, casserver.Config{})
	data := noise(1 << 20)
	c.put(t, data)
	stream := c.open(t.Context(), t, message(uploadName(data), 0, data[:10], false))
	var resp bspb.WriteResponse
	if err := stream.RecvMsg(&resp); err != nil || resp.CommittedSize != int64(len(data)) {
		t.Errorf("before the end of the upload: got %v, %v", resp.CommittedSize, err)
	}
	if err := stream.Send(message("", 10, data[10:], true)); err != nil && err != io.EOF {
		t.Errorf("send after the answer: got %v, want EOF", err)
	}
}

func TestRule041_ConcurrentlyStoredBlobIsNotAnError(t *testing.T) {
	c := serve(t, casserver.Config{})
	stream := c.open(t.Context(), t, message(uploadName("12345678"), 0, "1234", false))
	if err := c.uploadTo(t.Context(), "", "12345678"); err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(message("", 4, "5678", true)); err != nil && err != io.EOF {
		t.Fatal(err)
	}
	if resp, err := stream.CloseAndRecv(); err != nil || resp.CommittedSize != 8 {
		t.Errorf("got %v, %v, want 8", resp, err)
	}
}

func TestRule042_MismatchIsInvalidAndNotStored(t *testing.T) {
	c := serve(t, casserver.Config{})
	_, err := c.write(t.Context(), message(uploadName("12345678"), 0, "12345679", true))
	wantCode(t, err, codes.InvalidArgument, sum("12345678").String(), sum("12345679").String(), "upload the bytes")
	if n := c.memory(t, "").Len(); n != 0 {
		t.Errorf("%d blobs are stored", n)
	}
}

func TestRule042_TooMuchDataIsRejectedImmediately(t *testing.T) {
	// This store reads on without limit and drops the reason for a failure.
	m := castest.NewMemory()
	c := serve(t, casserver.Config{Instances: instances(greedy{m}, m)})
	stream := c.open(t.Context(), t, message(uploadName("12345678"), 0, "123456789", false))
	// The client neither finishes nor closes: the answer must not wait for that.
	wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), codes.InvalidArgument, "longer than the 8 bytes")
	if n := m.Len(); n != 0 {
		t.Errorf("%d blobs are stored", n)
	}
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
		if !strings.HasSuffix(err.Error(), test.want) {
			t.Errorf("got %v, want it to end with %q", err, test.want)
		}
	}
}

func TestRule047_ConcurrentUploadsOfOneBlobSucceed(t *testing.T) {
	c := serve(t, casserver.Config{})
	data := noise(1 << 20)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			name := fmt.Sprintf("uploads/u%d/%s", i, sum(data).Resource())
			n, err := c.write(t.Context(), message(name, 0, data[:1<<19], false), message("", 1<<19, data[1<<19:], true))
			if err != nil || n != 1<<20 {
				t.Errorf("got %d, %v", n, err)
			}
		})
	}
	group.Wait()
	if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(data).Resource()}); err != nil || string(got) != data {
		t.Errorf("read %d bytes back, %v", len(got), err)
	}
}

func TestRule047_OneUploadNameForSeveralBlobs(t *testing.T) {
	c := serve(t, casserver.Config{})
	first := c.open(t.Context(), t, message(uploadName("12345678"), 0, "1234", false))
	wantCode(t, c.uploadTo(t.Context(), "", "another"), codes.OK)
	if err := first.Send(message("", 4, "5678", true)); err != nil {
		t.Fatal(err)
	}
	if _, err := first.CloseAndRecv(); err != nil || !c.has(t, sum("12345678")) || !c.has(t, sum("another")) {
		t.Errorf("got %v, and %v are stored", err, c.memory(t, "").Digests())
	}
}

func TestRule048And049_ReadOffsetAndLimit(t *testing.T) {
	c := serve(t, casserver.Config{})
	data := noise(3<<20 + 5)
	name := c.put(t, data).Resource()
	size := int64(len(data))
	for _, row := range []struct {
		label      string
		off, limit int64
		want       string
		code       codes.Code
	}{
		{"whole", 0, 0, data, codes.OK},
		{"from within", 7, 0, data[7:], codes.OK},
		{"from the end", size, 0, "", codes.OK},
		{"beyond the end", size + 1, 0, "", codes.OutOfRange},
		{"negative offset", -1, 0, "", codes.OutOfRange},
		{"limit", 0, 1, data[:1], codes.OK},
		{"limit of several messages", 7, 2<<20 + 1, data[7 : 2<<20+8], codes.OK},
		{"limit to the end", 7, size - 7, data[7:], codes.OK},
		{"limit beyond the end", 7, size, data[7:], codes.OK},
		{"largest limit", 7, math.MaxInt64, data[7:], codes.OK},
		{"negative limit", 0, -1, "", codes.InvalidArgument},
	} {
		t.Run(row.label, func(t *testing.T) {
			got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: name, ReadOffset: row.off, ReadLimit: row.limit})
			wantCode(t, err, row.code)
			if string(got) != row.want {
				t.Errorf("got %d bytes, want %d", len(got), len(row.want))
			}
		})
	}
	_, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum("absent").Resource()})
	wantCode(t, err, codes.NotFound, sum("absent").String())
}

func TestRule052_ReadMessagesAreSmall(t *testing.T) {
	c := serve(t, casserver.Config{})
	d := c.put(t, noise(5<<20+3))
	names := []string{d.Resource()}
	for _, by := range compress.Compressors() {
		names = append(names, compressedName(by, d))
	}
	for _, name := range names {
		stream, err := c.Read(t.Context(), &bspb.ReadRequest{ResourceName: name})
		for err == nil {
			var m *bspb.ReadResponse
			if m, err = stream.Recv(); err == nil && (len(m.Data) == 0 || len(m.Data) > 1<<20) {
				t.Errorf("%s: got a message of %d bytes, want 1 byte to 1 MiB", name, len(m.Data))
			}
		}
		if err != io.EOF {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRule052_CancelClosesBlob(t *testing.T) {
	closed := make(chan struct{})
	instances, m := behind(&probe{open: func(_ cas.Digest, r io.ReadCloser) io.ReadCloser {
		return &closing{r, sync.OnceFunc(func() { close(closed) })}
	}})
	c := serve(t, casserver.Config{Instances: instances})
	d, err := cas.PutBytes(t.Context(), m, cas.SHA256, make([]byte, 32<<20))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.Read(ctx, &bspb.ReadRequest{ResourceName: d.Resource()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-closed
}

type closing struct {
	io.ReadCloser
	closed func()
}

func (c *closing) Close() error {
	c.closed()
	return c.ReadCloser.Close()
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
			if _, err := cas.PutBytes(t.Context(), m, cas.SHA256, []byte(data)); err != nil {
				t.Fatal(err)
			}
			want := codes.NotFound
			if label == "unreadable" {
				want = codes.Internal
			}
			for _, limit := range []int64{0, d.Size(), d.Size() + 1} {
				got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: d.Resource(), ReadLimit: limit})
				wantCode(t, err, want, d.String())
				if len(got) >= len(data) {
					t.Errorf("limit %d: got %d bytes, want fewer than %d", limit, len(got), len(data))
				}
			}
			for _, by := range compress.Compressors() {
				b, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: compressedName(by, d)})
				wantCode(t, err, want, d.String())
				if _, err := compress.Decode(by, b, d.Size()); err == nil {
					t.Errorf("%v: got a complete stream", by)
				}
			}
		})
	}
}

// broken is a reader that fails.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("input/output error") }

func TestRule054_HeaderMustMatchResourceName(t *testing.T) {
	const header = "build.bazel.remote.execution.v2.resource-name"
	c := serve(t, casserver.Config{})
	name := c.put(t, "data").Resource()
	for value, want := range map[string]codes.Code{
		name: codes.OK, "uploads/u/" + name: codes.OK, "blobs/x": codes.InvalidArgument, "": codes.InvalidArgument,
	} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), header, value)
		readWant, writeWant := want, want
		if value == name {
			writeWant = codes.InvalidArgument
		} else if value == "uploads/u/"+name {
			readWant = codes.InvalidArgument
		}
		_, err := c.read(ctx, &bspb.ReadRequest{ResourceName: name})
		wantCode(t, err, readWant)
		_, err = c.write(ctx, message("uploads/u/"+name, 0, "data", true))
		wantCode(t, err, writeWant)
		_, err = c.QueryWriteStatus(ctx, &bspb.QueryWriteStatusRequest{ResourceName: "uploads/u/" + name})
		wantCode(t, err, writeWant)
	}
}

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
