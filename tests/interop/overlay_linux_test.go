// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
)

// over returns the instance "" of an overlay of an in-memory store and a peer.
func over(t *testing.T, s *peers.Server, policy overlay.Policy) *cas.Instance {
	t.Helper()
	upstream := peer{dial(t, s, "")}
	served := must.Get(upstream.Instance(""))(t)
	o := must.Get(overlay.New(overlay.Config{
		Local: castest.Instances(),
		Upstream: func(name string) (*cas.Instance, error) {
			return &cas.Instance{Name: name, Store: upstream, Actions: upstream, Functions: served.Functions}, nil
		},
		Policy: policy, Journal: filepath.Join(t.TempDir(), "journal"),
	}))(t)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		must.Succeed(t, o.Close(ctx))
	})
	return must.Get(o.Instance(""))(t)
}

func TestOverlayMeetsTheStoreContract(t *testing.T) {
	for _, c := range []struct {
		name   string
		kind   peers.Kind
		policy overlay.Policy
	}{
		{"BazelRemoteThrough", peers.BazelRemote, overlay.WriteThrough},
		{"BBStorageThrough", peers.BBStorage, overlay.WriteThrough},
		{"BBStorageBack", peers.BBStorage, overlay.WriteBack},
	} {
		t.Run(c.name, func(t *testing.T) {
			castest.TestStore(t, func(t *testing.T) cas.Store { return over(t, start(t, c.kind), c.policy).Store })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return over(t, start(t, c.kind), c.policy).Actions })
		})
	}
}

// sizes are sent in a batch, in one message, and as a stream.
var sizes = []int{100, 70_000, 5 << 20}

// put stores a blob of each size and returns their digests.
func put(t *testing.T, s cas.Store, seed byte) []cas.Digest {
	t.Helper()
	var ds []cas.Digest
	for _, size := range sizes {
		b, d := castest.Blob(seed, size)
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
		ds = append(ds, d)
	}
	return ds
}

// read reads a blob of seed and checks its content.
func read(t *testing.T, s cas.Store, seed byte, d cas.Digest) error {
	t.Helper()
	r, err := s.Open(t.Context(), d, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	got, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if want, _ := castest.Blob(seed, int(d.Size())); !bytes.Equal(got, want) {
		return errors.New("content differs")
	}
	return nil
}

// wantRead checks that all blobs of seed are present and readable.
func wantRead(t *testing.T, s cas.Store, seed byte, ds []cas.Digest) {
	t.Helper()
	expect.Equal(t, len(must.Get(s.Missing(t.Context(), ds))(t)), 0, "missing")
	for _, d := range ds {
		expect.Error(t, read(t, s, seed, d), nil, "read %s", d)
	}
}

// TestUpstreamOutage: writes reach the peer and its blobs are readable. Without the peer, blobs read before are still
// readable, and others are unavailable rather than absent.
func TestUpstreamOutage(t *testing.T) {
	for _, k := range peers.Kinds() {
		t.Run(k.Name, func(t *testing.T) {
			s := start(t, k)
			upstream := peer{dial(t, s, "")}
			in := over(t, s, overlay.WriteThrough)
			wantRead(t, upstream, 1, put(t, in.Store, 1))
			known := put(t, upstream, 2)
			wantRead(t, in.Store, 2, known)
			unknown := put(t, upstream, 3)
			s.Kill()
			for _, d := range known {
				expect.Error(t, read(t, in.Store, 2, d), nil, "read local blob %s", d)
			}
			for _, d := range unknown {
				expect.Error(t, read(t, in.Store, 3, d), cas.ErrUnavailable,
					"read upstream blob %s without the upstream", d)
			}
		})
	}
}
