// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcmeta "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A fault changes the messages between a check and a correct server, which then looks faulty to the check.
type fault struct {
	name  string
	rules []int // that must detect it
	// request changes requests. reply changes the response m to req, which is nil for streams, and returns the error
	// for the client. Both may be nil and must be safe for concurrent use.
	request func(proto.Message)
	reply   func(req, m proto.Message, err error) error
	// dropHeaders drops the request headers.
	dropHeaders bool
}

func (f *fault) context(ctx context.Context) context.Context {
	if f.dropHeaders {
		return grpcmeta.NewOutgoingContext(ctx, nil)
	}
	return ctx
}

// sent returns the request to send instead of m.
func (f *fault) sent(m any) proto.Message {
	p := proto.Clone(m.(proto.Message))
	if f.request != nil {
		f.request(p)
	}
	return p
}

// received changes the response m.
func (f *fault) received(req proto.Message, m any, err error) error {
	if f.reply != nil {
		err = f.reply(req, m.(proto.Message), err)
	}
	return err
}

func (f *fault) options() []grpc.DialOption {
	unary := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		p := f.sent(req)
		return f.received(p, reply, invoke(f.context(ctx), method, p, reply, cc, opts...))
	}
	stream := func(ctx context.Context, d *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		s, err := open(f.context(ctx), d, cc, method, opts...)
		return &faultyStream{s, f}, err
	}
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(unary), grpc.WithChainStreamInterceptor(stream)}
}

type faultyStream struct {
	grpc.ClientStream
	fault *fault
}

func (s *faultyStream) SendMsg(m any) error { return s.ClientStream.SendMsg(s.fault.sent(m)) }
func (s *faultyStream) RecvMsg(m any) error {
	return s.fault.received(nil, m, s.ClientStream.RecvMsg(m))
}

// behind returns a client of a correct in-memory server behind a fault.
func behind(t testing.TB, f *fault) *client {
	t.Helper()
	server := grpc.NewServer(casserver.ServerOptions(nil)...)
	instances := castest.Instances()
	stop := must.Get(casserver.Register(server, casserver.Config{Instances: instances, MaxBlobBytes: 1 << 30}))(t)
	t.Cleanup(stop)
	c := over(t, grpctest.Connect(t, server, f.options()...))
	c.ours = true
	c.lose = func(d cas.Digest) {
		in, err := instances("")
		if err != nil {
			t.Error(err)
			return
		}
		in.Store.(*castest.Memory).Delete(d)
	}
	must.Succeed(t, c.getCapabilities(t.Context()))
	return c
}

// memoryRules returns the rules that apply to a server in memory, except those that take gigabytes.
func memoryRules() []rule {
	return slices.DeleteFunc(rules(), func(r rule) bool { return r.number > 69 || r.number == 55 || r.needs.what == ownServer.what })
}

// TestCheckerPassesCorrectServer is the counterpart of TestCheckerDetectsFaults.
func TestCheckerPassesCorrectServer(t *testing.T) {
	t.Parallel()
	c := behind(t, &fault{})
	checked := 0
	for _, r := range memoryRules() {
		switch got := c.evaluate(t, r); {
		case strings.HasPrefix(got.reason, "needs "):
		case got.outcome != pass:
			t.Errorf("rule %d, %s: %s", r.number, r.title, got.reason)
		default:
			checked++
		}
	}
	expect.That(t, checked >= 40, "only %d rules apply to a correct server, want at least 40", checked)
}

// TestCheckerDetectsFaults checks that the checks can fail.
func TestCheckerDetectsFaults(t *testing.T) {
	t.Parallel()
	byNumber := map[int]rule{}
	for _, r := range rules() {
		byNumber[r.number] = r
	}
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			c := behind(t, &f)
			for _, n := range f.rules {
				got := c.evaluate(t, byNumber[n])
				if got.outcome != fail || strings.HasPrefix(got.reason, "needs ") || strings.Contains(got.reason, panicked) {
					t.Errorf("rule %d, %s: got %s: %s; want a failure", n, got.title, got.outcome, got.reason)
				}
			}
		})
	}
}

// TestCheckerSurvivesStrangeServers checks that no response makes a check panic or hang.
func TestCheckerSurvivesStrangeServers(t *testing.T) {
	t.Parallel()
	everything := func(m proto.Message) bool {
		caps, ok := m.(*repb.ServerCapabilities)
		if ok {
			cache := caps.CacheCapabilities
			cache.SupportedCompressors = []repb.Compressor_Value{repb.Compressor_ZSTD, repb.Compressor_DEFLATE}
			cache.SupportedBatchUpdateCompressors = cache.SupportedCompressors
			cache.SplitBlobSupport, cache.SpliceBlobSupport = true, true
			cache.FastCdc_2020Params = &repb.FastCdc2020Params{AvgChunkSizeBytes: 512 << 10}
			caps.HighApiVersion.Minor = 13
			caps.ExecutionCapabilities = &repb.ExecutionCapabilities{ExecEnabled: true}
		}
		return ok
	}
	for name, reply := range map[string]func(req, m proto.Message, err error) error{
		"empty replies": func(req, m proto.Message, err error) error {
			if !everything(m) {
				proto.Reset(m)
			}
			if req == nil {
				return err // otherwise a stream would never end
			}
			return nil
		},
		"empty replies and ended streams": func(_, m proto.Message, err error) error {
			if !everything(m) {
				proto.Reset(m)
				return io.EOF
			}
			return nil
		},
		"empty list entries": func(_, m proto.Message, err error) error {
			if !everything(m) {
				clearLists(m)
			}
			return err
		},
		"UNKNOWN errors": func(_, m proto.Message, err error) error {
			if everything(m) {
				return nil
			}
			return status.Error(codes.Unknown, "what?")
		},
		"no capabilities": func(_, m proto.Message, err error) error {
			if _, ok := m.(*repb.ServerCapabilities); ok {
				return status.Error(codes.Internal, "no")
			}
			return status.Error(codes.Unimplemented, "no")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := behind(t, &fault{reply: reply})
			c.ours = false
			c.lose = nil
			for _, r := range rules() {
				if r.number == 55 || r.check == nil {
					continue
				}
				if got := c.evaluate(t, r); strings.Contains(got.reason, panicked) {
					t.Errorf("rule %d, %s: %s", r.number, r.title, got.reason)
				}
			}
		})
	}
}

// clearLists clears all messages in the lists of m.
func clearLists(m proto.Message) {
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.IsList() && f.Message() != nil {
			for i := range v.List().Len() {
				proto.Reset(v.List().Get(i).Message().Interface())
			}
		}
		return true
	})
}
