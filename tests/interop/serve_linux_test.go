// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// cloister compiles cloister once.
var cloister = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	return peers.BuildCloister(ctx)
})

// serve starts cloister serve in front of a peer and returns its store.
func serve(t *testing.T, upstream *peers.Server, flags ...string) *remote.Store {
	t.Helper()
	c, err := remote.Dial(t.Context(), "grpc://"+listen(t, append([]string{"--cas", "grpc://" + upstream.Addr}, flags...)...))
	must.Succeed(t, err)
	t.Cleanup(func() { c.Close() })
	return must.Get(c.Store(""))(t)
}

// listen starts cloister serve and returns its address.
func listen(t *testing.T, flags ...string) string {
	t.Helper()
	program := confiner(t)
	// It may print several addresses.
	addr := must.Get(loopback.Address())(t)
	s := must.Get(bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: program, Dir: t.TempDir(), Home: t.TempDir(), Listen: addr,
		Args: flags,
	}))(t)
	t.Cleanup(func() { must.Succeed(t, s.Stop()) })
	return addr
}

func TestServeForwardsToThePeer(t *testing.T) {
	t.Parallel()
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return peer{serve(t, start(t, k))} })
		})
	}
}

// TestServersShareAnUpstream: blobs written through one are readable through the other. Without the upstream, local
// blobs are still served.
func TestServersShareAnUpstream(t *testing.T) {
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			s := start(t, k)
			one, two := serve(t, s), serve(t, s, "--cas-write=back", "--drain-timeout=1s")
			wantRead(t, two, 1, put(t, one, 1))
			known := put(t, two, 2)
			s.Kill()
			for _, d := range known {
				expect.Error(t, read(t, two, 2, d), nil, "read local blob %s", d)
			}
			_, unknown := castest.Blob(3, 100)
			if err := read(t, two, 3, unknown); err == nil || errors.Is(err, cas.ErrNotFound) {
				t.Errorf("read unknown blob %s without the upstream: %v, want unavailable", unknown, err)
			}
		})
	}
}
