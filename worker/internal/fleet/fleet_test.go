// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/fleet"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// serve starts a server and returns a client of it.
func serve(t *testing.T, c fleet.Config) cloisterpb.FleetClient {
	t.Helper()
	s := grpc.NewServer()
	must.Succeed(t, fleet.Register(s, c))
	return cloisterpb.NewFleetClient(grpctest.Connect(t, s))
}

func TestRegisterWithoutQueue(t *testing.T) {
	expect.Message(t, fleet.Register(grpc.NewServer(), fleet.Config{}), "Config.Queue")
}

// TestStatusReportsTheQueue in full to a viewer of the instance, and with stage and age only to others.
func TestStatusReportsTheQueue(t *testing.T) {
	work := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer work.Close()
	linux := worker.Property{Name: "OSFamily", Value: "linux"}
	slot, err := work.Join(queue.Offer{Worker: "anvil", Slot: "1", Prefix: "main", Properties: []worker.Property{linux}})
	must.Succeed(t, err)
	submit := func(text string, demands ...worker.Property) cas.Digest {
		t.Helper()
		action := cas.SHA256.Sum([]byte(text))
		must.Get(work.Submit(queue.Request{Demands: demands, Task: worker.Task{
			Instance: "main/team", Action: action, Target: "//a", Mnemonic: "CppCompile", Invocation: "build-1",
		}}))(t)
		return action
	}
	action := submit("first", linux)
	run := must.Get(slot.Take(t.Context()))(t)
	submit("second", worker.Property{Name: "OSFamily", Value: "windows"})
	began := time.Now().Add(-time.Hour)
	viewers := &viewer{"main/team"}
	client := serve(t, fleet.Config{
		Queue: work, Name: "head", Version: "1.2", Started: began, Unready: func() []string { return []string{"full"} },
		Notes:   func() []string { return []string{"late"} },
		Viewers: viewers,
	})
	for s, word := range map[worker.Stage]string{worker.StageInputs: "fetch", worker.StageRun: "run", worker.StagePublish: "upload"} {
		run.Report(s)
		m := must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
		expect.Equal(t, m.Workers[0].Slots[0].Stage, word, "stage %v is reported as", s)
	}
	pull := &cloisterpb.ImagePull{}
	run.Pulling(func() *cloisterpb.ImagePull { return pull })
	m := must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	expect.Equal(t, m.Workers[0].Slots[0].Stage, "pull", "stage during a pull is reported as")
	run.Report(worker.StageInputs)
	pull = nil // the image is there
	m = must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	expect.Equal(t, m.Workers[0].Slots[0].Stage, "fetch", "stage after a pull is reported as")
	if m.Name != "head" || m.Version != "1.2" || !m.Started.AsTime().Equal(began) || m.Time == nil || !slices.Equal(m.Unready, []string{"full"}) ||
		!slices.Equal(m.Notes, []string{"late"}) ||
		m.Queued != 1 || m.Running != 1 || m.Oldest == nil {
		t.Errorf("server is reported as %v", m)
	}
	if len(m.Demands) != 1 || !slices.Equal(m.Demands[0].Properties, []string{"OSFamily=windows"}) || m.Demands[0].Queued != 1 || !strings.Contains(m.Demands[0].Unmet, "anvil") {
		t.Errorf("demands are reported as %v", m.Demands)
	}
	w := m.Workers[0]
	if w.Name != "anvil" || w.InstanceNamePrefix != "main" || !slices.Equal(w.Properties, []string{"OSFamily=linux"}) || w.Seen == nil || w.Drained != nil || w.Gone != nil {
		t.Errorf("worker is reported as %v", w)
	}
	want := &cloisterpb.Slot{
		Name: "1", Action: action.String(), InstanceName: "main/team", TargetId: "//a", ActionMnemonic: "CppCompile",
		InvocationId: "build-1", Began: w.Slots[0].Began, Stage: w.Slots[0].Stage,
	}
	expect.That(t, proto.Equal(w.Slots[0], want) && want.Began != nil,
		"slot is reported as %v, want %v", w.Slots[0], want)

	expect.That(t, m.Elsewhere == nil, "a viewer of everything sees Elsewhere: %v, want none", m.Elsewhere)

	viewers.instance = "main/other"
	m = must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	if len(m.Demands) != 0 || m.Queued != 1 || m.Elsewhere.GetQueued() != 1 || m.Elsewhere.Workers != 0 {
		t.Errorf("a viewer of another instance sees demands %v and elsewhere %v, want none and one queued", m.Demands, m.Elsewhere)
	}
	if got, want := m.Workers[0].Slots[0], (&cloisterpb.Slot{Name: "1", Began: want.Began, Stage: want.Stage}); !proto.Equal(got, want) {
		t.Errorf("a viewer of another instance sees slot %v, want %v", got, want)
	}

	viewers.instance = "main/team"
	slot.Leave("power off")
	m = must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	if w := m.Workers[0]; w.Gone == nil || w.Lost != 1 || len(w.Slots) != 0 || m.Queued != 2 || m.Again != 1 {
		t.Errorf("after the worker left: %v", m)
	}
}

// TestLongDemandsAreNotListed: clients choose demands, and must not make the status too large to receive.
func TestLongDemandsAreNotListed(t *testing.T) {
	work := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer work.Close()
	const n, length = 600, 10_000
	for i := range n {
		kind := worker.Property{Name: "kind", Value: fmt.Sprintf("%0*d", length, i)}
		action := cas.SHA256.Sum([]byte(kind.Value))
		must.Get(work.Submit(queue.Request{Demands: []worker.Property{kind}, Task: worker.Task{Action: action}}))(t)
	}
	m := must.Get(serve(t, fleet.Config{Queue: work}).Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	listed := len(m.Demands)
	expect.That(t, listed > 50 && listed*length <= 1<<20, "%d demands are listed", listed)
	want := fmt.Sprintf("the demands of %d waiting actions are not listed", n-listed)
	expect.That(t, len(m.Notes) == 1 && strings.Contains(m.Notes[0], want), "Notes = %q, want %q", m.Notes, want)
}

// A viewer sees one instance.
type viewer struct{ instance string }

func (v *viewer) Sees(_ context.Context, instance string) bool { return instance == v.instance }

func (v *viewer) SeesBelow(_ context.Context, prefix string) bool {
	return prefix == "" || (v.instance + "/")[:min(len(prefix)+1, len(v.instance)+1)] == prefix+"/"
}

// TestTenantsSeeOnlyTheirInstances and the workers that serve them: no name, property or drain reason of others.
func TestTenantsSeeOnlyTheirInstances(t *testing.T) {
	work := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer work.Close()
	for _, o := range []queue.Offer{
		{Worker: "for-crimson", Slot: "1", Prefix: "crimson", Properties: []worker.Property{{Name: "pool", Value: "crimson-only"}}},
		{Worker: "for-crimson", Slot: "2", Prefix: "crimson", Properties: []worker.Property{{Name: "pool", Value: "crimson-only"}}},
		{Worker: "for-blue", Slot: "1", Prefix: "blue"},
		{Worker: "for-all", Slot: "1", Properties: []worker.Property{{Name: "pool", Value: "shared"}}},
	} {
		must.Get(work.Join(o))(t)
	}
	work.DrainWorker("for-crimson", "crimson's kernel")
	work.DrainWorker("for-blue", "blue's kernel")
	work.DrainWorker("for-all", "everybody's kernel")
	for i, r := range []struct{ instance, gpu string }{
		{"crimson", "crimson-gpu"}, {"crimson/team", "both"}, {"blue", "both"}, {"blue", "both"}, {"blue", "blue-gpu"},
	} {
		must.Get(work.Submit(queue.Request{Demands: []worker.Property{{Name: "gpu", Value: r.gpu}}, Task: worker.Task{
			Instance: r.instance, Action: cas.SHA256.Sum([]byte{byte(i)}),
		}}))(t)
	}
	status := func(c fleet.Config) *cloisterpb.StatusResponse {
		t.Helper()
		c.Queue = work
		return must.Get(serve(t, c).Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	}

	all := status(fleet.Config{})
	expect.That(t, len(all.Workers) == 3 && len(all.Demands) == 3 && all.Demands[1].Queued == 3 && all.Elsewhere == nil,
		"without Viewers: %v, want everything", all)
	m := status(fleet.Config{Viewers: &viewer{"blue"}})
	if text := m.String(); strings.Contains(text, "crimson") {
		t.Errorf("blue sees crimson: %s", text)
	}
	expect.That(t, len(m.Demands) == 2 && m.Demands[0].Queued == 1 && m.Demands[1].Queued == 2 && len(m.Workers) == 2,
		"blue sees %v and %v, want two demands and two workers", m.Demands, m.Workers)
	if want := (&cloisterpb.Elsewhere{Queued: 2, Workers: 1, Slots: 2}); !proto.Equal(m.Elsewhere, want) || m.Queued != 5 {
		t.Errorf("blue sees %v elsewhere of %d queued, want %v of 5", m.Elsewhere, m.Queued, want)
	}
	// A worker serves the instances below its prefix.
	m = status(fleet.Config{Viewers: &viewer{"crimson/team"}})
	if text := m.String(); strings.Contains(text, "blue") || strings.Contains(text, "crimson-gpu") || !strings.Contains(text, "crimson-only") || len(m.Workers) != 2 {
		t.Errorf("a team of crimson sees %s", text)
	}
}

// TestDrainRecordsReasonAndCaller and reports unknown names with the known ones.
func TestDrainRecordsReasonAndCaller(t *testing.T) {
	work := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer work.Close()
	client := serve(t, fleet.Config{Queue: work, Caller: func(context.Context) string { return "ops" }})
	unknown := func(want string) {
		t.Helper()
		for _, do := range []func(context.Context, *cloisterpb.DrainRequest, ...grpc.CallOption) (*cloisterpb.DrainResponse, error){client.Drain, client.Undrain} {
			_, err := do(t.Context(), &cloisterpb.DrainRequest{Worker: "tongs"})
			expect.That(t, status.Code(err) == codes.NotFound && strings.Contains(err.Error(), want),
				"unknown name: %v, want NOT_FOUND with %q", err, want)
		}
	}
	unknown("known workers: none")
	for _, name := range []string{"anvil", "bellows"} {
		must.Get(work.Join(queue.Offer{Worker: name, Slot: "1"}))(t)
	}
	unknown("known workers: anvil, bellows")
	for _, reason := range []string{"two\nlines", strings.Repeat("long ", 200)} {
		expect.Code(t, expect.Err(client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: reason})),
			codes.InvalidArgument, "reason %.20q", reason)
	}
	if w := work.Workers()[0]; !w.Drained.IsZero() {
		t.Errorf("a refused call drained %+v", w)
	}
	for reason, want := range map[string]string{"a kernel": "a kernel (by ops)", "": "(by ops)"} {
		r, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: reason})
		if err != nil || !slices.Equal(r.Workers, []string{"anvil"}) {
			t.Fatal(r, err)
		}
		if w := work.Workers()[0]; w.Drained.IsZero() || w.Why != want {
			t.Errorf("Why is %q, want %q", w.Why, want)
		}
	}
	if w := work.Workers()[1]; !w.Drained.IsZero() {
		t.Error("the other worker is drained, too")
	}
	if _, err := client.Undrain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil"}); err != nil || !work.Workers()[0].Drained.IsZero() {
		t.Errorf("Undrain: %v, want the worker undrained", err)
	}
}

// TestDrainsAreKept before the call returns, and a failure to keep them is reported.
func TestDrainsAreKept(t *testing.T) {
	work := must.Get(queue.New(queue.Config{Head: true}))(t)
	defer work.Close()
	must.Get(work.Join(queue.Offer{Worker: "anvil", Slot: "1", Ending: true}))(t)
	var kept queue.DrainState
	var broken error
	client := serve(t, fleet.Config{Queue: work, Keep: func(s queue.DrainState) error {
		kept = s
		return broken
	}})
	m := must.Get(client.Status(t.Context(), &cloisterpb.StatusRequest{}))(t)
	if s := m.Workers[0].Slots[0]; s.Began == nil || s.Stage != "end" || s.Action != "" {
		t.Errorf("ending slot is reported as %v", s)
	}
	if _, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: "a kernel"}); err != nil || kept.Workers["anvil"].Why != "a kernel" {
		t.Errorf("kept %+v, %v", kept, err)
	}
	broken = errors.New("no room")
	if _, err := client.Undrain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil"}); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "no room") {
		t.Errorf("failed Keep: %v, want INTERNAL with the reason", err)
	}
	kept = queue.DrainState{Joining: &queue.Drain{}}
	if _, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "tongs"}); status.Code(err) != codes.NotFound || kept.Joining == nil {
		t.Errorf("drain of an unknown worker kept %+v, %v", kept, err)
	}
}
