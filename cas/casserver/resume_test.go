// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A putting store reports the start and the end of each Put.
type putting struct {
	cas.Store
	began chan<- struct{}
	ended chan<- error
}

func (p *putting) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	p.began <- struct{}{}
	// Ignore the context: the reader alone must end the Put.
	err := p.Store.Put(context.WithoutCancel(ctx), d, r)
	p.ended <- err
	return err
}

// puttingServer serves a memory through a putting.
func puttingServer(t *testing.T) (c *client, m *castest.Memory, began <-chan struct{}, ended <-chan error) {
	t.Helper()
	m = castest.NewMemory()
	begins, ends := make(chan struct{}, 1000), make(chan error, 1000)
	return serve(t, casserver.Config{Instances: instances(&putting{m, begins, ends}, m)}), m, begins, ends
}

// query calls QueryWriteStatus.
func (c *client) query(t *testing.T, name string) (n int64, complete bool, code codes.Code) {
	t.Helper()
	r, err := c.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
	return r.GetCommittedSize(), r.GetComplete(), status.Code(err)
}

// wantKept checks that n bytes of an upload are kept, or with n = 0 that the upload is unknown.
func (c *client) wantKept(t *testing.T, name string, n int64) {
	t.Helper()
	got, complete, code := c.query(t, name)
	if want := codes.OK; n == 0 && code != codes.NotFound || n > 0 && (code != want || got != n || complete) {
		t.Errorf("%s: %d bytes are kept, complete %v, %v; want %d", name, got, complete, code, n)
	}
}

// waitKept waits until n bytes of an upload have arrived.
func (c *client) waitKept(t *testing.T, name string, n int64) {
	t.Helper()
	must.Hold(t, fmt.Sprintf("%d bytes of %s arrive", n, name), func() bool {
		got, _, code := c.query(t, name)
		return code == codes.OK && got == n
	})
}

// open starts a Write stream.
func (c *client) open(ctx context.Context, t *testing.T, messages ...*bspb.WriteRequest) bspb.ByteStream_WriteClient {
	t.Helper()
	stream := must.Get(c.Write(ctx))(t)
	for _, m := range messages {
		must.Succeed(t, stream.Send(m))
	}
	return stream
}

func TestRule046_QueryWriteStatus(t *testing.T) {
	c := serve(t, casserver.Config{})
	name := uploadName("12345678")
	c.wantKept(t, name, 0)
	_, err := c.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name})
	wantCode(t, err, codes.NotFound, "offset 0")
	_, err = c.write(t.Context(), message(name, 0, "1234", false))
	wantCode(t, err, codes.InvalidArgument, sum("12345678").String(), "resume at offset 4", "offset 0")
	c.wantKept(t, name, 4)
	// The metadata is not part of the upload's identity; everything else is.
	c.wantKept(t, name+"/some/metadata", 4)
	c.wantKept(t, "uploads/v/"+sum("12345678").Resource(), 0)
	c.wantKept(t, "a/"+name, 0)
	c.wantKept(t, uploadName("1234"), 0)
	c.put(t, "12345678")
	if n, complete, code := c.query(t, "uploads/never/"+sum("12345678").Resource()); n != 8 || !complete || code != codes.OK {
		t.Errorf("with the blob present: got %d, %v, %v, want 8, complete", n, complete, code)
	}
}

func TestRule039_InterruptedUploadResumes(t *testing.T) {
	data := noise(3<<20 + 7)
	name := uploadName(data)
	for label, breakOff := range map[string]func(t *testing.T, c *client, messages ...*bspb.WriteRequest){
		"stream ends": func(t *testing.T, c *client, messages ...*bspb.WriteRequest) {
			_, err := c.write(t.Context(), messages...)
			wantCode(t, err, codes.InvalidArgument, "finish_write")
		},
		"client disconnects": func(t *testing.T, c *client, messages ...*bspb.WriteRequest) {
			ctx, cancel := context.WithCancel(t.Context())
			c.open(ctx, t, messages...)
			last := messages[len(messages)-1]
			c.waitKept(t, name, last.WriteOffset+int64(len(last.Data)))
			cancel()
		},
	} {
		t.Run(label, func(t *testing.T) {
			c, m, began, ended := puttingServer(t)
			a, b := int64(1<<20), int64(2<<20+1)
			breakOff(t, c, message(name, 0, data[:100], false), message("", 100, data[100:a], false))
			c.wantKept(t, name, a)
			breakOff(t, c, message(name, a, data[a:b], false))
			c.wantKept(t, name, b)
			expect.That(t, m.Len() == 0, "got stored blobs, want none")
			n, err := c.write(t.Context(), message(name, b, data[b:], true))
			expect.That(t, err == nil && n == int64(len(data)), "got %d, %v, want %d", n, err, len(data))
			expect.That(t, len(began) == 1 && len(ended) == 1 && m.Len() == 1,
				"got %d started and %d ended Puts, want one", len(began), len(ended))
			if n, complete, _ := c.query(t, name); !complete || n != int64(len(data)) {
				t.Errorf("at the end: got %d, complete %v", n, complete)
			}
			if got, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(data).Resource()}); err != nil || string(got) != data {
				t.Errorf("read %d bytes back, %v", len(got), err)
			}
		})
	}
}

func TestRule038_FirstOffsetIsZeroOrCommitted(t *testing.T) {
	c, m, _, ended := puttingServer(t)
	name := uploadName("12345678")
	_, err := c.write(t.Context(), message(name, 4, "5678", true))
	wantCode(t, err, codes.InvalidArgument, "upload is unknown", "offset 0")
	_, err = c.write(t.Context(), message(name, 0, "1234", false))
	wantCode(t, err, codes.InvalidArgument)
	for _, off := range []int64{-1, 1, 3, 5, 8, 1 << 62} {
		_, err := c.write(t.Context(), message(name, off, "5678", true))
		wantCode(t, err, codes.InvalidArgument, fmt.Sprintf("write_offset is %d", off), "resume at offset 4", "start at offset 0")
		c.wantKept(t, name, 4)
	}
	// An upload that restarts at 0 may have other data.
	_, err = c.write(t.Context(), message(name, 0, "12", false))
	wantCode(t, err, codes.InvalidArgument)
	expect.That(t, <-ended != nil, "the first Put succeeded")
	c.wantKept(t, name, 2)
	if n, err := c.write(t.Context(), message(name, 2, "3456", false), message("", 6, "78", true)); err != nil || n != 8 || m.Len() != 1 {
		t.Errorf("got %d, %v, and %d blobs are stored", n, err, m.Len())
	}
}

// On disk, waiting uploads count against the budget and vanish with the server.
func TestRule056_WaitingUploadsVanishWithServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20})
	must.Succeed(t, err)
	c := serve(t, casserver.Config{Instances: store.Instance})
	data, other := noise(3<<20), noise(3<<20+1)
	_, err = c.write(t.Context(), message(uploadName(data), 0, data[:1<<20], false))
	wantCode(t, err, codes.InvalidArgument)
	_, err = c.write(t.Context(), message(uploadName(other), 0, other[:1<<20], false))
	wantCode(t, err, codes.InvalidArgument)
	if n := store.Stats().Bytes; n < 2<<20 {
		t.Errorf("two waiting uploads: got %d bytes, want at least 2 MiB", n)
	}
	expect.Equal(t, must.Get(c.write(t.Context(), message(uploadName(data), 1<<20, data[1<<20:], true)))(t), 3<<20)
	c.stop()
	expect.Error(t, store.Close(), nil)
	if store, err = disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	in, err := store.Instance("")
	must.Succeed(t, err)
	missing, err := in.Store.Missing(t.Context(), []cas.Digest{sum(data), sum(other)})
	if err != nil || len(missing) != 1 || missing[0] != sum(other) || store.Stats().Bytes > 4<<20 {
		t.Errorf("got missing %v, %v and %d bytes of the store, want the other blob missing", missing, err, store.Stats().Bytes)
	}
}

func TestRule042_FaultsEndUpload(t *testing.T) {
	name := uploadName("12345678")
	for label, messages := range map[string][]*bspb.WriteRequest{
		"gap":          {message("", 5, "5678", true)},
		"other name":   {message(uploadName("x"), 4, "5678", true)},
		"too many":     {message("", 4, "56789", false)},
		"too early":    {message("", 4, "567", true)},
		"other data":   {message("", 4, "5679", true)},
		"without data": {message("", 4, "", true)},
	} {
		t.Run(label, func(t *testing.T) {
			c, m, _, ended := puttingServer(t)
			_, err := c.write(t.Context(), append([]*bspb.WriteRequest{message(name, 0, "1234", false)}, messages...)...)
			wantCode(t, err, codes.InvalidArgument, sum("12345678").String())
			if err := <-ended; err == nil || m.Len() != 0 {
				t.Errorf("Put ended with %v, and %d blobs are stored", err, m.Len())
			}
			c.wantKept(t, name, 0)
		})
	}
	t.Run("after resuming", func(t *testing.T) {
		c, m, _, ended := puttingServer(t)
		_, err := c.write(t.Context(), message(name, 0, "1234", false))
		wantCode(t, err, codes.InvalidArgument)
		_, err = c.write(t.Context(), message(name, 4, "5679", true))
		wantCode(t, err, codes.InvalidArgument, "upload the bytes")
		if err := <-ended; err == nil || m.Len() != 0 {
			t.Errorf("Put ended with %v, and %d blobs are stored", err, m.Len())
		}
		c.wantKept(t, name, 0)
	})
}

// The server may notice a lost connection late; the returning client must not wait for that.
func TestRule047_SecondStreamSupersedesFirst(t *testing.T) {
	data := noise(1 << 20)
	name := uploadName(data)
	for label, off := range map[string]int64{"resume": 1 << 19, "restart": 0} {
		t.Run(label, func(t *testing.T) {
			c, m, _, _ := puttingServer(t)
			first := c.open(t.Context(), t, message(name, 0, data[:1<<19], false))
			c.waitKept(t, name, 1<<19)
			n, err := c.write(t.Context(), message(name, off, data[off:off+10], false), message("", off+10, data[off+10:], true))
			if err != nil || n != int64(len(data)) || m.Len() != 1 {
				t.Errorf("the second stream: got %d, %v, and %d blobs", n, err, m.Len())
			}
			err = first.RecvMsg(&bspb.WriteResponse{})
			wantCode(t, err, codes.Aborted, "another stream")
		})
	}
	t.Run("at an uncommitted offset", func(t *testing.T) {
		c, m, _, _ := puttingServer(t)
		first := c.open(t.Context(), t, message(name, 0, data[:1<<19], false))
		c.waitKept(t, name, 1<<19)
		_, err := c.write(t.Context(), message(name, 1, data[1:], true))
		wantCode(t, err, codes.InvalidArgument, "resume at offset 524288")
		wantCode(t, first.RecvMsg(&bspb.WriteResponse{}), codes.Aborted)
		if n, err := c.write(t.Context(), message(name, 1<<19, data[1<<19:], true)); err != nil || n != int64(len(data)) || m.Len() != 1 {
			t.Errorf("got %d, %v", n, err)
		}
	})
}

func TestWaitingUploadsAreLimited(t *testing.T) {
	c, m, _, ended := puttingServer(t)
	name := func(i int) string { return fmt.Sprintf("uploads/u%d/%s", i, sum("12345678").Resource()) }
	const kept = 64
	for i := range kept + 3 {
		_, err := c.write(t.Context(), message(name(i), 0, "1234", false))
		wantCode(t, err, codes.InvalidArgument)
	}
	for range 3 {
		expect.That(t, <-ended != nil, "a dropped upload succeeded")
	}
	for i := range kept + 3 {
		want := int64(4)
		if i < 3 {
			want = 0 // those that waited longest
		}
		c.wantKept(t, name(i), want)
	}
	c.stop()
	expect.Equal(t, len(ended), kept, "uploads that have ended when stop returns")
	expect.That(t, m.Len() == 0, "got stored blobs, want none")
	c.stop()
}

func TestStopEndsUploads(t *testing.T) {
	c, m, _, ended := puttingServer(t)
	waiting, running := uploadName("waiting 1"), uploadName("running 1")
	_, err := c.write(t.Context(), message(waiting, 0, "waiting", false))
	wantCode(t, err, codes.InvalidArgument)
	stream := c.open(t.Context(), t, message(running, 0, "running", false))
	c.waitKept(t, running, 7)
	c.stop()
	wantCode(t, stream.RecvMsg(&bspb.WriteResponse{}), codes.Unavailable)
	expect.That(t, len(ended) == 2, "%d uploads have ended when stop returns, want 2", len(ended))
	for range len(ended) {
		if err := <-ended; err == nil || m.Len() != 0 {
			t.Errorf("Put ended with %v, and %d blobs are stored", err, m.Len())
		}
	}
	_, err = c.write(t.Context(), message(waiting, 0, "waiting", false), message("", 7, " 1", true))
	wantCode(t, err, codes.Unavailable, "stopping")
	// Uploads of a single message still succeed.
	wantCode(t, c.uploadTo(t.Context(), "", "at once"), codes.OK)
}

func TestFullStoreDropsWaitingUploads(t *testing.T) {
	m := castest.NewMemory()
	s := &probe{Store: m, put: func(d cas.Digest) error {
		if d == sum("large") {
			return cas.ErrFull
		}
		return nil
	}}
	c := serve(t, casserver.Config{Instances: instances(s, m)})
	name := uploadName("12345678")
	_, err := c.write(t.Context(), message(name, 0, "1234", false))
	wantCode(t, err, codes.InvalidArgument)
	wantCode(t, c.uploadTo(t.Context(), "", "large"), codes.ResourceExhausted)
	c.wantKept(t, name, 0)

	_, err = c.write(t.Context(), message(name, 0, "1234", false))
	wantCode(t, err, codes.InvalidArgument)
	r, err := c.BatchUpdateBlobs(t.Context(), &repb.BatchUpdateBlobsRequest{Requests: []*repb.BatchUpdateBlobsRequest_Request{
		{Digest: sum("large").Proto(), Data: []byte("large")},
	}})
	expect.That(t, err == nil && codes.Code(r.Responses[0].Status.GetCode()) == codes.ResourceExhausted,
		"got %v, %v, want RESOURCE_EXHAUSTED", r, err)
	c.wantKept(t, name, 0)
}

// TestFullStoreKeepsUploadsOfOthers: a caller whose blob does not fit discards interrupted uploads of others only if
// their clients are probably gone and it has none of its own.
func TestFullStoreKeepsUploadsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := castest.NewMemory()
		s := &probe{Store: m, put: func(d cas.Digest) error {
			if d == sum("large") {
				return cas.ErrFull
			}
			return nil
		}}
		c := serveWith(t, casserver.Config{Instances: instances(s, m), StreamIdle: time.Minute}, callers()...)
		name := func(caller string) string { return "uploads/" + caller + "/" + sum("12345678").Resource() }
		interrupt := func(caller string) {
			t.Helper()
			_, err := c.write(as(t.Context(), caller), message(name(caller), 0, "1234", false))
			wantCode(t, err, codes.InvalidArgument)
		}
		for _, fail := range []func(context.Context){
			func(ctx context.Context) { wantCode(t, c.uploadTo(ctx, "", "large"), codes.ResourceExhausted) },
			func(ctx context.Context) {
				r := must.Get(c.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{
					Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: sum("large").Proto(), Data: []byte("large")}},
				}))(t)
				expect.Equal(t, codes.Code(r.Responses[0].Status.GetCode()), codes.ResourceExhausted)
			},
		} {
			interrupt("other")
			for range 3 {
				interrupt("own")
				fail(as(t.Context(), "own"))
				c.wantKept(t, name("own"), 0)
				fail(as(t.Context(), "own"))
				c.wantKept(t, name("other"), 4)
			}
			time.Sleep(2 * time.Minute)
			interrupt("own")
			fail(as(t.Context(), "own"))
			c.wantKept(t, name("own"), 0)
			c.wantKept(t, name("other"), 4)
			fail(as(t.Context(), "own"))
			c.wantKept(t, name("other"), 0)
		}
	})
}

// The store cannot evict waiting uploads, so they must leave room for outputs.
func TestWaitingUploadsTakeLittleOfTheStore(t *testing.T) {
	c := serve(t, casserver.Config{MaxBlobBytes: 80})
	name := func(i int) string { return fmt.Sprintf("uploads/u%d/%s", i, sum("12345678").Resource()) }
	for i := range 3 {
		_, err := c.write(t.Context(), message(name(i), 0, "1234", false))
		wantCode(t, err, codes.InvalidArgument)
	}
	c.wantKept(t, name(0), 0)
	c.wantKept(t, name(1), 4)
	c.wantKept(t, name(2), 4)
	large := strings.Repeat("x", 80)
	_, err := c.write(t.Context(), message(uploadName(large), 0, large[:70], false))
	wantCode(t, err, codes.InvalidArgument)
	c.wantKept(t, name(1), 0)
	c.wantKept(t, name(2), 0)
	c.wantKept(t, uploadName(large), 70)
}

// TestCallersKeepTheirWaitingUploads: many or large interrupted uploads of one caller do not displace those of others.
func TestCallersKeepTheirWaitingUploads(t *testing.T) {
	c := serveWith(t, casserver.Config{MaxBlobBytes: 8 * 1000}, callers()...)
	name := func(i int) string { return fmt.Sprintf("uploads/u%d/%s", i, sum("12345678").Resource()) }
	interrupt := func(caller string, i int) {
		t.Helper()
		_, err := c.write(as(t.Context(), caller), message(name(i), 0, "1234", false))
		wantCode(t, err, codes.InvalidArgument)
	}
	interrupt("modest", 0)
	for i := range 100 {
		interrupt("greedy", 1+i)
	}
	c.wantKept(t, name(0), 4)
	c.wantKept(t, name(1), 0)
	c.wantKept(t, name(100), 4)
	for _, size := range []int{990, 7000} { // 1000 bytes may wait
		large := strings.Repeat("x", size+1)
		_, err := c.write(as(t.Context(), "greedy"), message(uploadName(large), 0, large[:size], false))
		wantCode(t, err, codes.InvalidArgument)
		c.wantKept(t, uploadName(large), int64(size))
		c.wantKept(t, name(0), 4)
	}
	c.wantKept(t, name(100), 0)
	interrupt("modest", 101)
	n, err := c.write(as(t.Context(), "modest"), message(name(0), 4, "5678", true))
	expect.That(t, err == nil && n == 8, "resumed: got %d, %v", n, err)
}

// The session is another goroutine, so its panic must be passed to the call.
func TestPanicInSessionReachesCall(t *testing.T) {
	instances, _ := behind(&probe{put: func(cas.Digest) error { panic("defect") }})
	c := serve(t, casserver.Config{Instances: instances})
	_, err := c.write(t.Context(), message(uploadName("12345678"), 0, "1234", false), message("", 4, "5678", true))
	wantCode(t, err, codes.Internal, "Write")
	expect.That(t, strings.Contains(c.log.String(), "defect") && strings.Contains(c.log.String(), "resume_test.go"),
		"log: got %s, want the location", c.log)
	c.wantKept(t, uploadName("12345678"), 0)
}
