// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/logstream"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestNoNameReachesAnotherInstance combines the segments of resource names: ByteStream must read every admitted name as
// one of the caller's instance. A disagreement between the two parsers would open every instance.
func TestNoNameReachesAnotherInstance(t *testing.T) {
	const depth = 4 // segments before HASH/SIZE
	rules := parse(t, "version: 1\ncallers: [{name: g, anonymous: true, rights: [{read: a}, {write: a}]}]")
	var mu sync.Mutex
	var asked []string
	memory := castest.Instances()
	instances := func(name string) (*cas.Instance, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, name)
		return memory(name)
	}
	logs := must.Get(logstream.New(logstream.Config{Instances: instances}))(t)
	defer logs.Close()
	g := grpc.NewServer(append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), rules.Options()...)...)
	casserver.Register(g, casserver.Config{Instances: instances, Logs: logs})
	s := &server{T: t, address: grpctest.Listen(t, g)}
	c := bspb.NewByteStreamClient(s.dial(nil, ""))
	reads, queries := 0, 0
	try := func(name string) {
		r, err := c.Read(t.Context(), &bspb.ReadRequest{ResourceName: name})
		if err == nil {
			if _, err = r.Recv(); !passed(err) {
				return
			}
		}
		if _, err := c.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: name}); err == nil {
			queries++
		}
		mu.Lock()
		defer mu.Unlock()
		reads += len(asked)
		for _, instance := range asked {
			expect.That(t, instance == "a", "%q is taken for one of instance %q", name, instance)
		}
		asked = nil
	}
	var all func(prefix []string)
	all = func(prefix []string) {
		try(strings.Join(append(slices.Clip(prefix), blob.Hash, "0"), "/"))
		if len(prefix) == depth {
			return
		}
		for _, s := range []string{"", "a", "b", "blobs", "uploads", "compressed-blobs", "logstreams", "sha256"} {
			all(append(slices.Clip(prefix), s))
		}
	}
	all(nil)
	expect.That(t, reads != 0 && queries != 0,
		"%d names are of an instance, and %d are of an upload: nothing is shown", reads, queries)
}

// TestNoNameReachesALogStreamOfAnotherInstance creates log streams in instances whose names look like parts of stream
// names, and tries to read and write them with rights in instances that they contain.
func TestNoNameReachesALogStreamOfAnotherInstance(t *testing.T) {
	logs := must.Get(logstream.New(logstream.Config{Instances: castest.Instances()}))(t)
	defer logs.Close()
	var streams []*logpb.LogStream
	parents := []string{""}
	for _, a := range []string{"a", "b", "logstreams"} {
		parents = append(parents, a)
		for _, b := range []string{"a", "b", "logstreams"} {
			parents = append(parents, a+"/"+b, a+"/logstreams/"+b)
		}
	}
	owner := map[string]string{}
	for _, parent := range parents {
		if l, err := logs.CreateLogStream(t.Context(), &logpb.CreateLogStreamRequest{Parent: parent}); err == nil {
			streams = append(streams, l)
			owner[l.Name] = parent
		}
	}
	reached := 0
	for _, mine := range []string{"", "a"} {
		rules := parse(t, fmt.Sprintf("version: 1\ncallers: [{name: g, anonymous: true, rights: [{read: %q}, {write: %[1]q}]}]", mine))
		g := grpc.NewServer(append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), rules.Options()...)...)
		casserver.Register(g, casserver.Config{Instances: castest.Instances(), Logs: logs})
		c := bspb.NewByteStreamClient((&server{T: t, address: grpctest.Listen(t, g)}).dial(nil, ""))
		for _, l := range streams {
			for _, before := range append(parents, "-") {
				name, to := l.Name, l.WriteResourceName
				if before != "-" {
					name, to = under(before, "logstreams/"+l.Name), under(before, "logstreams/"+l.WriteResourceName)
				}
				if _, err := c.QueryWriteStatus(t.Context(), &bspb.QueryWriteStatusRequest{ResourceName: to}); err == nil {
					if reached++; owner[l.Name] != mine {
						t.Errorf("rights in %q reach %q of instance %q", mine, to, owner[l.Name])
					}
				}
				// A negative offset is out of range for a stream that is found, which would otherwise wait.
				r, err := c.Read(t.Context(), &bspb.ReadRequest{ResourceName: name, ReadOffset: -1})
				if err == nil {
					_, err = r.Recv()
				}
				if status.Code(err) == codes.OutOfRange {
					if reached++; owner[l.Name] != mine {
						t.Errorf("rights in %q reach %q of instance %q", mine, name, owner[l.Name])
					}
				}
			}
		}
	}
	expect.That(t, reached >= 4, "%d names reach a stream: nothing is shown", reached)
}
