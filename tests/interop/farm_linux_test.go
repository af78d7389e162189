// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

// TestSchedulerPassesOn: what a client puts at the address of Buildbarn's scheduler is in the store behind it, and
// what is there comes back, so that a client needs no other address.
func TestSchedulerPassesOn(t *testing.T) {
	store := start(t, peers.BazelRemote)
	scheduler := launch(t, peers.BBScheduler, peers.Options{Store: store.Addr})
	front, behind := peer{dial(t, scheduler, "")}, peer{dial(t, store, "")}
	wantRead(t, behind, 1, put(t, front, 1))
	wantRead(t, front, 2, put(t, behind, 2))
	castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return front })
}
