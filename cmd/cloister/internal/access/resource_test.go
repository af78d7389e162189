// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/worker/logstream"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
)

// TestNoNameReachesAnotherInstance combines the segments of resource names: ByteStream must read every admitted name as one of
// the caller's instance. A disagreement between the two parsers would open every instance.
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
	logs := logstream.New(logstream.Config{Instances: instances})
	defer logs.Close()
	g := grpc.NewServer(append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), rules.Options()...)...)
	casserver.Register(g, casserver.Config{Instances: instances, Logs: logs})
	s := &server{T: t, address: listen(t, g)}
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
			if instance != "a" {
				t.Errorf("%q is taken for one of instance %q", name, instance)
			}
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
	if reads == 0 || queries == 0 {
		t.Errorf("%d names are of an instance, and %d are of an upload: nothing is shown", reads, queries)
	}
}
