// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// A client is connected to its own server and can access its stores directly.
type client struct {
	repb.CapabilitiesClient
	repb.ContentAddressableStorageClient
	bspb.ByteStreamClient
	repb.ActionCacheClient

	conn      *grpc.ClientConn
	instances cas.Instances
	storage   any           // the implementation of ContentAddressableStorage
	log       *bytes.Buffer // complete once the call has returned
	stop      func()        // ends interrupted uploads
}

// serve starts a server; the zero Config serves instances in memory.
func serve(t testing.TB, c casserver.Config) *client {
	t.Helper()
	var log bytes.Buffer
	cl := serveWith(t, c, append(casserver.ServerOptions(slog.New(slog.NewTextHandler(&log, nil))), casserver.Codec())...)
	cl.log = &log
	return cl
}

// serveWith is serve with other options.
func serveWith(t testing.TB, c casserver.Config, options ...grpc.ServerOption) *client {
	t.Helper()
	if c.Instances == nil {
		c.Instances = castest.Instances()
	}
	s := &registrar{Server: grpc.NewServer(options...)}
	stop := must.Get(casserver.Register(s, c))(t)
	cl := &client{instances: c.Instances, storage: s.storage, stop: stop}
	t.Cleanup(cl.stop)
	cl.connect(t, s.Server, nil)
	return cl
}

// A registrar is a grpc.Server that records the registered implementation of ContentAddressableStorage.
type registrar struct {
	*grpc.Server
	storage any
}

func (r *registrar) RegisterService(d *grpc.ServiceDesc, impl any) {
	if d.ServiceName == repb.ContentAddressableStorage_ServiceDesc.ServiceName {
		r.storage = impl
	}
	r.Server.RegisterService(d, impl)
}

// await waits until limited, which is casserver.Chunking or casserver.Trees, returns these numbers.
func (c *client) await(t *testing.T, limited func(any) (int, int), callers, calls int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		gotCallers, gotCalls := limited(c.storage)
		if gotCallers == callers && gotCalls == calls {
			return
		}
		must.Be(t, time.Now().Before(end), "got %d callers with %d calls, want %d with %d", gotCallers, gotCalls, callers, calls)
	}
}

// callers returns the options of a server that gets the names of its callers from as.
func callers() []grpc.ServerOption {
	return quota.New(quota.Config{Name: func(ctx context.Context) string {
		return strings.Join(metadata.ValueFromIncomingContext(ctx, "caller"), "")
	}}).Options()
}

// as returns a context for calls of the caller with that name.
func as(ctx context.Context, caller string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "caller", caller)
}

// connect runs s and connects c to it, through wrap if that is not nil.
func (c *client) connect(t testing.TB, s *grpc.Server, wrap func(net.Conn) net.Conn, options ...grpc.DialOption) {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	conn, err := grpc.NewClient("passthrough:///bufconn", append(options,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := l.DialContext(ctx)
			if err == nil && wrap != nil {
				conn = wrap(conn)
			}
			return conn, err
		}))...)
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close() })
	c.conn = conn
	c.CapabilitiesClient = repb.NewCapabilitiesClient(conn)
	c.ContentAddressableStorageClient = repb.NewContentAddressableStorageClient(conn)
	c.ByteStreamClient, c.ActionCacheClient = bspb.NewByteStreamClient(conn), repb.NewActionCacheClient(conn)
}

// memory returns the store of an instance.
func (c *client) memory(t *testing.T, instance string) *castest.Memory {
	t.Helper()
	in := must.Get(c.instances(instance))(t)
	return in.Store.(*castest.Memory)
}

// put stores data directly.
func (c *client) put(t *testing.T, data string) cas.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), c.memory(t, ""), cas.SHA256, []byte(data)))(t)
}

// has reports whether the default instance has d.
func (c *client) has(t *testing.T, d cas.Digest) bool {
	t.Helper()
	missing := must.Get(c.memory(t, "").Missing(t.Context(), []cas.Digest{d}))(t)
	return len(missing) == 0
}

// read returns all data of a Read.
func (c *client) read(ctx context.Context, req *bspb.ReadRequest) ([]byte, error) {
	stream, err := c.Read(ctx, req)
	if err != nil {
		return nil, err
	}
	var all []byte
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return all, nil
		} else if err != nil {
			return all, err
		}
		all = append(all, m.Data...)
	}
}

// write sends messages, closes the stream and returns the committed size.
func (c *client) write(ctx context.Context, messages ...*bspb.WriteRequest) (int64, error) {
	stream, err := c.Write(ctx)
	if err != nil {
		return 0, err
	}
	for _, m := range messages {
		if err := stream.Send(m); err != nil {
			break // the server has answered
		}
	}
	resp, err := stream.CloseAndRecv()
	return resp.GetCommittedSize(), err
}

// sum returns the digest of data.
func sum(data string) cas.Digest { return cas.SHA256.Sum([]byte(data)) }

// noise returns n pseudorandom bytes determined by n.
func noise(n int) string {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{}).Read(b)
	return string(b)
}

// wantCode checks the code of err and that its text contains the words.
func wantCode(t testing.TB, err error, code codes.Code, words ...string) {
	t.Helper()
	expect.Code(t, err, code)
	for _, w := range words {
		expect.That(t, err == nil || strings.Contains(err.Error(), w), "error %q does not say %q", err, w)
	}
}

// A target is the blob or action of a call.
type target struct {
	instance string
	function repb.DigestFunction_Value
	digest   *repb.Digest
}

// A call is one RPC on a target. Its error is that of the call or of the blob.
type call struct {
	name string
	do   func(context.Context, target) error
}

// calls returns all RPCs that name a blob.
func (c *client) calls() []call {
	name := func(t target, rest ...string) string {
		segs := strings.Split(t.instance, "/")
		if t.instance == "" {
			segs = nil
		}
		segs = append(append(segs, rest...), "blobs")
		if t.function != repb.DigestFunction_UNKNOWN {
			segs = append(segs, strings.ToLower(t.function.String()))
		}
		return strings.Join(append(segs, fmt.Sprintf("%s/%d", t.digest.GetHash(), t.digest.GetSizeBytes())), "/")
	}
	return []call{
		{"FindMissingBlobs", func(ctx context.Context, t target) error {
			_, err := c.FindMissingBlobs(ctx, &repb.FindMissingBlobsRequest{
				InstanceName: t.instance, DigestFunction: t.function, BlobDigests: []*repb.Digest{t.digest},
			})
			return err
		}},
		{"BatchUpdateBlobs", func(ctx context.Context, t target) error {
			r, err := c.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{
				InstanceName: t.instance, DigestFunction: t.function,
				Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: t.digest, Data: []byte("data")}},
			})
			if err == nil {
				err = status.ErrorProto(r.Responses[0].Status)
			}
			return err
		}},
		{"BatchReadBlobs", func(ctx context.Context, t target) error {
			r, err := c.BatchReadBlobs(ctx, &repb.BatchReadBlobsRequest{
				InstanceName: t.instance, DigestFunction: t.function, Digests: []*repb.Digest{t.digest},
			})
			if err == nil {
				err = status.ErrorProto(r.Responses[0].Status)
			}
			return err
		}},
		{"GetTree", func(ctx context.Context, t target) error {
			_, err := c.tree(ctx, &repb.GetTreeRequest{
				InstanceName: t.instance, DigestFunction: t.function, RootDigest: t.digest,
			})
			return err
		}},
		{"SplitBlob", func(ctx context.Context, t target) error {
			_, err := c.SplitBlob(ctx, &repb.SplitBlobRequest{InstanceName: t.instance, DigestFunction: t.function, BlobDigest: t.digest})
			return err
		}},
		{"GetChunkMapping", func(ctx context.Context, t target) error {
			_, err := c.chunks(ctx, &repb.GetChunkMappingRequest{InstanceName: t.instance, DigestFunction: t.function, BlobDigest: t.digest})
			return err
		}},
		{"SpliceBlob", func(ctx context.Context, t target) error {
			_, err := c.SpliceBlob(ctx, &repb.SpliceBlobRequest{
				InstanceName: t.instance, DigestFunction: t.function, BlobDigest: t.digest, ChunkDigests: []*repb.Digest{t.digest},
			})
			return err
		}},
		{"RegisterChunkMapping", func(ctx context.Context, t target) error {
			return c.register(ctx, &repb.RegisterChunkMappingRequest{
				InstanceName: t.instance, DigestFunction: t.function, BlobDigest: t.digest, ChunkDigests: []*repb.Digest{t.digest},
			})
		}},
		{"Read", func(ctx context.Context, t target) error {
			_, err := c.read(ctx, &bspb.ReadRequest{ResourceName: name(t)})
			return err
		}},
		{"Write", func(ctx context.Context, t target) error {
			_, err := c.write(ctx, &bspb.WriteRequest{
				ResourceName: name(t, "uploads", "u"), Data: []byte("data"), FinishWrite: true,
			})
			return err
		}},
		{"QueryWriteStatus", func(ctx context.Context, t target) error {
			_, err := c.QueryWriteStatus(ctx, &bspb.QueryWriteStatusRequest{ResourceName: name(t, "uploads", "u")})
			return err
		}},
		{"GetActionResult", func(ctx context.Context, t target) error {
			_, err := c.GetActionResult(ctx, &repb.GetActionResultRequest{
				InstanceName: t.instance, DigestFunction: t.function, ActionDigest: t.digest,
			})
			return err
		}},
		{"UpdateActionResult", func(ctx context.Context, t target) error {
			_, err := c.UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
				InstanceName: t.instance, DigestFunction: t.function, ActionDigest: t.digest,
				ActionResult: &repb.ActionResult{},
			})
			return err
		}},
	}
}

// A probe is a store with hooks.
type probe struct {
	cas.Store
	open    func(cas.Digest, io.ReadCloser) io.ReadCloser
	put     func(cas.Digest) error
	missing func([]cas.Digest)
}

func (p *probe) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := p.Store.Open(ctx, d, off)
	if err == nil && p.open != nil {
		r = p.open(d, r)
	}
	return r, err
}

func (p *probe) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if p.put != nil {
		if err := p.put(d); err != nil {
			return err
		}
	}
	return p.Store.Put(ctx, d, r)
}

func (p *probe) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if p.missing != nil {
		p.missing(ds)
	}
	return p.Store.Missing(ctx, ds)
}

// instances returns instances that all have this store and action cache.
func instances(store cas.Store, actions cas.ActionCache) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		return &cas.Instance{Name: name, Store: store, Actions: actions}, nil
	}
}

// behind returns instances that all share one Memory, accessed through p.
func behind(p *probe) (cas.Instances, *castest.Memory) {
	m := castest.NewMemory()
	p.Store = m
	return instances(p, m), m
}

func TestRule015_UnknownInstanceIsAlwaysInvalid(t *testing.T) {
	known := castest.Instances()
	c := serve(t, casserver.Config{Instances: func(name string) (*cas.Instance, error) {
		if name != "known" {
			return nil, fmt.Errorf("%w instance %q", cas.ErrInvalid, name)
		}
		return known(name)
	}})
	for _, call := range c.calls() {
		t.Run(call.name, func(t *testing.T) {
			wantCode(t, call.do(t.Context(), target{instance: "other", digest: sum("data").Proto()}), codes.InvalidArgument, `"other"`)
		})
	}
	_, err := c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{InstanceName: "other"})
	wantCode(t, err, codes.InvalidArgument, `"other"`)
	_, err = c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{InstanceName: "known"})
	wantCode(t, err, codes.OK)
}

// uploadTo writes data to an instance.
func (c *client) uploadTo(ctx context.Context, instance, data string) error {
	_, err := c.write(ctx, &bspb.WriteRequest{
		ResourceName: strings.TrimPrefix(instance+"/uploads/u/"+sum(data).Resource(), "/"),
		Data:         []byte(data), FinishWrite: true,
	})
	return err
}

func TestPanicFailsOnlyItsCall(t *testing.T) {
	defect := "defect"
	instances, _ := behind(&probe{
		put:     func(cas.Digest) error { panic(defect) },
		missing: func(ds []cas.Digest) { _ = ds[1] },
	})
	c := serve(t, casserver.Config{Instances: instances})
	for _, call := range c.calls() {
		switch call.name {
		case "FindMissingBlobs", "BatchUpdateBlobs", "Write":
			err := call.do(t.Context(), target{digest: sum("data").Proto()})
			wantCode(t, err, codes.Internal, call.name)
			expect.That(t, strings.Contains(c.log.String(), call.name), "want %s in the log: %s", call.name, c.log)
		}
	}
	expect.That(t, strings.Count(c.log.String(), "goroutine") >= 3, "log: got %s, want stacks", c.log)
}
