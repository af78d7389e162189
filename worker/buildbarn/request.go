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

// maxText bounds the bytes of worker_id and of platform, which are kept and quoted in messages.
const maxText = 16 << 10

// slotKeys are the keys of a worker_id that distinguish the slots of a machine: of Clients and of bb_worker.
var slotKeys = []string{"slot", "thread"}

// Further keys of a Client's worker_id: ClientConfig.Worker and ClientConfig.Store.
const workerKey, storeKey = "worker", "store"

// An identity names the slot that calls.
type identity struct {
	name  string // the worker_id as Buildbarn writes it, without the store
	store string // of a Client; "" if unknown
}

// parseOffer returns the offer and the identity of a caller.
func parseOffer(req *remoteworkerpb.SynchronizeRequest) (queue.Offer, identity, error) {
	refuse := func(format string, args ...any) (queue.Offer, identity, error) {
		return queue.Offer{}, identity{}, status.Errorf(codes.InvalidArgument, format, args...)
	}
	id, store := splitStore(req.WorkerId)
	name, err := workerName(id)
	if err != nil {
		return queue.Offer{}, identity{}, err
	}
	if len(store) > maxStore || unprintable(store) {
		return refuse("worker_id: %s is not printable text of at most %d bytes", storeKey, maxStore)
	}
	if err := cas.CheckInstanceName(req.InstanceNamePrefix); err != nil {
		return refuse("instance_name_prefix: %v", err)
	}
	if req.SizeClass != 0 {
		return refuse("size_class %d: this server has no size classes; use 0", req.SizeClass)
	}
	offer := queue.Offer{Prefix: req.InstanceNamePrefix, Places: store != ""} // a Client
	offer.Worker, offer.Slot = workerAndSlot(req.WorkerId)
	size := 0
	for i, p := range req.Platform.GetProperties() {
		property := worker.Property{Name: p.GetName(), Value: p.GetValue()}
		if size += len(property.Name) + len(property.Value); size > maxText || unprintable(property.Name+property.Value) {
			return refuse("platform: its properties are not printable text of at most %d bytes", maxText)
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
	return offer, identity{name, store}, nil
}

// maxStore bounds the bytes of a store.
const maxStore = 256

// splitStore returns a worker_id without the store, and the store; "" unless the ID is a Client's.
func splitStore(id map[string]string) (rest map[string]string, store string) {
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
		if size += len(k) + len(v); size > maxText || unprintable(k+v) {
			return "", status.Errorf(codes.InvalidArgument, "worker_id is not printable text of at most %d bytes", maxText)
		}
	}
	if size == 0 {
		return "", status.Error(codes.InvalidArgument, "worker_id is empty: give each slot of each machine its own ID")
	}
	name, err := json.Marshal(id)
	return string(name), err
}

// workerAndSlot splits a worker_id into the machine and the slot. The machine is what all its slots have in common: the
// only value if there is one, else all values with their keys.
func workerAndSlot(id map[string]string) (machine, slot string) {
	id, _ = splitStore(id)
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
	return nil, status.Error(codes.InvalidArgument, "Worker provided no current state, or an unknown one")
}

func unprintable(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
