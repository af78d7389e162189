// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxSaid is how many bytes of worker_id and of platform are read: both are kept, and quoted in messages.
const maxSaid = 16 << 10

// slotKeys are the keys of a worker_id that tell the slots of one machine apart: ours, and bb_worker's.
var slotKeys = []string{"slot", "thread"}

// The keys of a worker_id of ours, beside that of the slot: the name, and what only one process has at a time.
const workerKey, storeKey = "worker", "store"

// A sender is whose call it is.
type sender struct {
	name  string // the worker_id as Buildbarn writes it, without the store
	store string // of a worker of ours, "" if it does not say
}

// parseOffer returns what the sender of req takes, and who that is.
func parseOffer(req *remoteworkerpb.SynchronizeRequest) (queue.Offer, sender, error) {
	refuse := func(format string, args ...any) (queue.Offer, sender, error) {
		return queue.Offer{}, sender{}, status.Errorf(codes.InvalidArgument, format, args...)
	}
	id, store := apart(req.WorkerId)
	name, err := workerName(id)
	if err != nil {
		return queue.Offer{}, sender{}, err
	}
	if len(store) > maxStore || unprintable(store) {
		return refuse("worker_id: %s is not printable text of at most %d bytes", storeKey, maxStore)
	}
	if err := cas.CheckInstanceName(req.InstanceNamePrefix); err != nil {
		return refuse("instance_name_prefix: %v", err)
	}
	if req.SizeClass != 0 {
		return refuse("size_class %d: no size classes are declared here, so that every worker is of size class 0", req.SizeClass)
	}
	offer := queue.Offer{Prefix: req.InstanceNamePrefix}
	offer.Worker, offer.Slot = place(req.WorkerId)
	size := 0
	for i, p := range req.Platform.GetProperties() {
		property := worker.Property{Name: p.GetName(), Value: p.GetValue()}
		if size += len(property.Name) + len(property.Value); size > maxSaid || unprintable(property.Name+property.Value) {
			return refuse("platform: its properties are not printable text of at most %d bytes", maxSaid)
		}
		if i > 0 {
			before := offer.Properties[i-1]
			if before.Compare(property) >= 0 {
				return refuse("Platform properties are not lexicographically sorted, as property %s should have been placed before property %s, once",
					property, before)
			}
		}
		offer.Properties = append(offer.Properties, property)
	}
	return offer, sender{name, store}, nil
}

// maxStore is how many bytes of a store are read.
const maxStore = 256

// apart returns a worker_id without the store, and the store, "" of ids that are not as ours.
func apart(id map[string]string) (rest map[string]string, store string) {
	if id[workerKey] == "" || len(id) != 3 {
		return id, ""
	}
	rest = maps.Clone(id)
	delete(rest, storeKey)
	return rest, id[storeKey]
}

// workerName returns a worker_id as JSON.
func workerName(id map[string]string) (string, error) {
	size := 0
	for k, v := range id {
		if size += len(k) + len(v); size > maxSaid || unprintable(k+v) {
			return "", status.Errorf(codes.InvalidArgument, "worker_id is not printable text of at most %d bytes", maxSaid)
		}
	}
	if size == 0 {
		return "", status.Error(codes.InvalidArgument, "worker_id is empty: each slot of each machine needs one of its own")
	}
	name, err := json.Marshal(id)
	return string(name), err
}

// place returns which machine a worker_id is of, and which of its slots. The machine is what all slots have in common: the
// one value where there is one alone, else all with their keys.
func place(id map[string]string) (machine, slot string) {
	id, _ = apart(id)
	var rest, slots []string
	for _, k := range slices.Sorted(maps.Keys(id)) {
		if slices.Contains(slotKeys, k) {
			slots = append(slots, id[k])
		} else {
			rest = append(rest, k+"="+id[k])
		}
	}
	machine = strings.Join(rest, ",")
	if len(rest) == 1 {
		_, machine, _ = strings.Cut(machine, "=")
	}
	return cmp.Or(machine, "unnamed"), cmp.Or(strings.Join(slots, "/"), "0")
}

// parseState returns what the worker executes, nil if it is idle.
func parseState(s *remoteworkerpb.CurrentState) (*remoteworkerpb.CurrentState_Executing, error) {
	switch state := s.GetWorkerState().(type) {
	case *remoteworkerpb.CurrentState_Idle:
		return nil, nil
	case *remoteworkerpb.CurrentState_Executing_:
		if state.Executing.GetActionDigest() == nil {
			return nil, status.Error(codes.InvalidArgument, "Worker is executing, but provided no action digest")
		}
		return state.Executing, nil
	}
	return nil, status.Error(codes.InvalidArgument, "Worker did not provide its current state, or an unknown one")
}

func unprintable(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
