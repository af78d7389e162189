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
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

// cloister compiles the program once.
var cloister = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	return peers.BuildCloister(ctx)
})

// serve starts cloister serve in front of a peer and returns an instance of it; it ends with the test.
func serve(t *testing.T, upstream *peers.Server, flags ...string) *remote.Store {
	t.Helper()
	c, err := remote.Dial(t.Context(), "grpc://"+listen(t, append([]string{"--cas", "grpc://" + upstream.Addr}, flags...)...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	store, err := c.Store("")
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// listen starts cloister serve and returns its address; it ends with the test.
func listen(t *testing.T, flags ...string) string {
	t.Helper()
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	// What it prints names two addresses.
	addr, err := peers.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: program, Dir: t.TempDir(), Home: t.TempDir(), Listen: addr,
		Args: flags,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return addr
}

// TestServe: all that is put through cloister serve is at the peer and comes back, over the whole way.
func TestServe(t *testing.T) {
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return peer{serve(t, start(t, k))} })
		})
	}
}

// TestServeAndUpstream: what one client puts through one server another reads through a second one, for both have
// the same peer behind them. Without the peer, what is near is still served.
func TestServeAndUpstream(t *testing.T) {
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			s := start(t, k)
			one, two := serve(t, s), serve(t, s, "--cas-write=back", "--drain-timeout=1s")
			wantRead(t, two, 1, put(t, one, 1))
			known := put(t, two, 2)
			s.Kill()
			for _, d := range known {
				if err := read(t, two, 2, d); err != nil {
					t.Errorf("read %s, which is near, without the upstream: %v", d, err)
				}
			}
			_, unknown := castest.Blob(3, 100)
			if err := read(t, two, 3, unknown); err == nil || errors.Is(err, cas.ErrNotFound) {
				t.Errorf("read %s, which may be far, without the upstream: %v, want that it is unavailable", unknown, err)
			}
		})
	}
}
