// SPDX-License-Identifier: Apache-2.0

// Package interop_test runs Cloister with servers and clients of other projects. Package peers builds them at pinned
// versions; where that fails, tests skip with the reason.
package interop_test

import (
	"context"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// programs builds each peer once.
var programs = map[string]func() (string, error){}

func init() {
	for _, k := range append(peers.Kinds(), peers.RemoteTool, peers.VersityGW,
		peers.BBScheduler, peers.BBWorker, peers.BBRunner, peers.BBState, peers.BBDescriptors) {
		programs[k.Name] = sync.OnceValues(func() (string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
			defer cancel()
			return k.Build(ctx)
		})
	}
}

// TestProgramsCompile builds each peer and cloister. It can be run alone to build them for the other tests.
func TestProgramsCompile(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		t.Run(name, func(t *testing.T) {
			if _, err := programs[name](); err != nil {
				sandboxtest.Unavailable(t, "interop", err)
			}
		})
	}
	must.Get(cloister())(t)
}

// start starts a peer with an empty store that serves results without checking their blobs.
func start(t *testing.T, k peers.Kind) *peers.Server { return startAs(t, k, true) }

// startAs starts a peer with an empty store.
func startAs(t *testing.T, k peers.Kind, results bool) *peers.Server {
	t.Helper()
	return launch(t, k, peers.Options{Results: results})
}

// launch starts a peer, which ends with the test. It sets the program in the options and, if it is empty, the
// directory.
func launch(t *testing.T, k peers.Kind, o peers.Options) *peers.Server {
	t.Helper()
	var err error
	if o.Program, err = programs[k.Name](); err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	s := must.Get(k.Start(t.Context(), o))(t)
	t.Cleanup(func() { must.Succeed(t, s.Stop()) })
	return s
}

// dial returns the store of an instance of a peer.
func dial(t *testing.T, s *peers.Server, instance string) *remote.Store {
	t.Helper()
	return dialAt(t, s.Addr, instance)
}

// dialAt returns the store of an instance at an address.
func dialAt(t *testing.T, addr, instance string) *remote.Store {
	t.Helper()
	c := must.Get(remote.Dial(t.Context(), "grpc://"+addr))(t)
	t.Cleanup(func() { c.Close() })
	return must.Get(c.Store(instance))(t)
}

// A peer is a peer's store without harmless deviations from the contract.
type peer struct {
	*remote.Store
}

// key returns the digest under which a result is stored: bazel-remote ignores the size.
func key(action cas.Digest) cas.Digest { return action.Function().Sum([]byte(action.String())) }

// Lookup implements cas.ActionCache. It removes what peers add to a result: the time of completion and the client's
// address.
func (p peer) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	result, err := p.Store.Lookup(ctx, key(action))
	if m := result.GetExecutionMetadata(); m != nil {
		m.WorkerCompletedTimestamp = nil
		if net.ParseIP(m.Worker) != nil {
			m.Worker = ""
		}
		if proto.Equal(m, &repb.ExecutedActionMetadata{}) {
			result.ExecutionMetadata = nil
		}
	}
	return result, err
}

// Record implements cas.ActionCache.
func (p peer) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	return p.Store.Record(ctx, key(action), r)
}

func TestPeersMeetTheStoreContract(t *testing.T) {
	t.Parallel()
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return peer{dial(t, start(t, k), "")} })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return peer{dial(t, start(t, k), "")} })
		})
	}
}
