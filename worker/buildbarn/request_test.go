// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"testing"

	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestWorkerIDsAreSplitIntoWorkerAndSlot(t *testing.T) {
	for name, row := range map[string]struct {
		id            map[string]string
		machine, slot string
	}{
		"cloister":      {map[string]string{"worker": "anvil", "slot": "3"}, "anvil", "3"},
		"with a store":  {map[string]string{"worker": "anvil", "slot": "3", "store": "f0"}, "anvil", "3"},
		"bb_worker":     {map[string]string{"hostname": "ubuntu-1", "thread": "0"}, "ubuntu-1", "0"},
		"a pod":         {map[string]string{"node": "n", "pod": "p", "thread": "2"}, "node=n,pod=p", "2"},
		"slot of racks": {map[string]string{"datacenter": "paris", "rack": "4", "slot": "15", "hostname": "u", "thread": "7"}, "datacenter=paris,hostname=u,rack=4", "15/7"},
		"other stores":  {map[string]string{"hostname": "u", "thread": "7", "store": "f0"}, "hostname=u,store=f0", "7"},
		"one slot":      {map[string]string{"hostname": "u"}, "u", "0"},
		"only a slot":   {map[string]string{"thread": "1"}, "unnamed", "1"},
	} {
		if machine, slot := workerAndSlot(row.id); machine != row.machine || slot != row.slot {
			t.Errorf("%s: got %s, %s; want %s, %s", name, machine, slot, row.machine, row.slot)
		}
	}
}

// TestOnlyClientsImplementPlaces: workers of other makes get no action that states a path or user, unless they offer
// it.
func TestOnlyClientsImplementPlaces(t *testing.T) {
	for name, c := range map[string]struct {
		id   map[string]string
		want bool
	}{
		"a Client":  {map[string]string{"worker": "anvil", "slot": "3", "store": "f0"}, true},
		"no store":  {map[string]string{"worker": "anvil", "slot": "3"}, false},
		"bb_worker": {map[string]string{"hostname": "u", "thread": "7"}, false},
		"imitation": {map[string]string{"hostname": "u", "thread": "7", "store": "f0"}, false},
	} {
		offer, _, err := parseOffer(&remoteworkerpb.SynchronizeRequest{WorkerId: c.id})
		expect.That(t, err == nil && offer.Places == c.want,
			"%s: got %t, %v, want %t", name, offer.Places, err, c.want)
	}
}
