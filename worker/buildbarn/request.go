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

// parseOffer returns what the sender of req takes, and its name: the worker_id as Buildbarn writes it.
func parseOffer(req *remoteworkerpb.SynchronizeRequest) (queue.Offer, string, error) {
	refuse := func(format string, args ...any) (queue.Offer, string, error) {
		return queue.Offer{}, "", status.Errorf(codes.InvalidArgument, format, args...)
	}
	name, err := workerName(req.WorkerId)
	if err != nil {
		return queue.Offer{}, "", err
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
	return offer, name, nil
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
