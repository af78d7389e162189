// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/fleet"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// serve serves the service over a queue.
func serve(t *testing.T, c fleet.Config) cloisterpb.FleetClient {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	fleet.Register(s, c)
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	conn, err := grpc.NewClient("passthrough:///"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return cloisterpb.NewFleetClient(conn)
}

// TestStatus: everything that the queue knows is told, and of an instance that a caller may not see only that something
// runs, for how long, and how far it is.
func TestStatus(t *testing.T) {
	work := queue.New(queue.Config{Head: true})
	defer work.Close()
	linux := worker.Property{Name: "OSFamily", Value: "linux"}
	slot, err := work.Join(queue.Offer{Worker: "anvil", Slot: "1", Prefix: "main", Properties: []worker.Property{linux}})
	if err != nil {
		t.Fatal(err)
	}
	submit := func(text string, demands ...worker.Property) cas.Digest {
		t.Helper()
		action := cas.SHA256.Sum([]byte(text))
		_, err := work.Submit(queue.Request{Demands: demands, Task: worker.Task{
			Instance: "main/team", Action: action, Target: "//a", Mnemonic: "CppCompile", Invocation: "build-1"}})
		if err != nil {
			t.Fatal(err)
		}
		return action
	}
	action := submit("first", linux)
	run, err := slot.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	submit("second", worker.Property{Name: "OSFamily", Value: "windows"})
	began := time.Now().Add(-time.Hour)
	viewers := &viewer{"main/team"}
	client := serve(t, fleet.Config{
		Queue: work, Name: "head", Version: "1.2", Started: began, Unready: func() []string { return []string{"full"} },
		Viewers: viewers,
	})
	for s, word := range map[worker.Stage]string{worker.StageInputs: "fetch", worker.Run: "run", worker.Publish: "upload"} {
		run.Report(s)
		m, err := client.Status(t.Context(), &cloisterpb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Workers[0].Slots[0].Stage; got != word {
			t.Errorf("stage %v is told as %q", s, got)
		}
	}
	m, err := client.Status(t.Context(), &cloisterpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "head" || m.Version != "1.2" || !m.Started.AsTime().Equal(began) || m.Time == nil || !slices.Equal(m.Unready, []string{"full"}) ||
		m.Queued != 1 || m.Running != 1 || m.Oldest == nil {
		t.Errorf("the server is told as %v", m)
	}
	if len(m.Demands) != 1 || !slices.Equal(m.Demands[0].Properties, []string{"OSFamily=windows"}) || m.Demands[0].Queued != 1 || !strings.Contains(m.Demands[0].Unmet, "anvil") {
		t.Errorf("what waits is told as %v", m.Demands)
	}
	w := m.Workers[0]
	if w.Name != "anvil" || w.InstanceNamePrefix != "main" || !slices.Equal(w.Properties, []string{"OSFamily=linux"}) || w.Seen == nil || w.Drained != nil || w.Gone != nil {
		t.Errorf("the worker is told as %v", w)
	}
	want := &cloisterpb.Slot{Name: "1", Action: action.String(), InstanceName: "main/team", TargetId: "//a", ActionMnemonic: "CppCompile",
		InvocationId: "build-1", Began: w.Slots[0].Began, Stage: w.Slots[0].Stage}
	if !proto.Equal(w.Slots[0], want) || want.Began == nil {
		t.Errorf("the slot is told as %v, want %v", w.Slots[0], want)
	}

	if m.Elsewhere != nil {
		t.Errorf("somebody who may see everything is told that there is more: %v", m.Elsewhere)
	}

	viewers.instance = "main/other"
	if m, err = client.Status(t.Context(), &cloisterpb.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	if len(m.Demands) != 0 || m.Queued != 1 || m.Elsewhere.GetQueued() != 1 || m.Elsewhere.Workers != 0 {
		t.Errorf("somebody who may not see the instance is told %v of what waits, and %v", m.Demands, m.Elsewhere)
	}
	if got, want := m.Workers[0].Slots[0], (&cloisterpb.Slot{Name: "1", Began: want.Began, Stage: want.Stage}); !proto.Equal(got, want) {
		t.Errorf("somebody who may not see the instance is told %v", got)
	}

	viewers.instance = "main/team"
	slot.Leave("it was switched off")
	if m, err = client.Status(t.Context(), &cloisterpb.StatusRequest{}); err != nil {
		t.Fatal(err)
	}
	if w := m.Workers[0]; w.Gone == nil || w.Lost != 1 || len(w.Slots) != 0 || m.Queued != 2 || m.Again != 1 {
		t.Errorf("after the worker has left: %v", m)
	}
}

// A viewer may know of one instance.
type viewer struct{ instance string }

func (v *viewer) Sees(_ context.Context, instance string) bool { return instance == v.instance }

func (v *viewer) SeesBelow(_ context.Context, prefix string) bool {
	return prefix == "" || (v.instance + "/")[:min(len(prefix)+1, len(v.instance)+1)] == prefix+"/"
}

// TestStatusOfTenants: each is told of what waits in his instances and of the workers that take their actions; of others
// neither a name, nor a property, nor why somebody drains.
func TestStatusOfTenants(t *testing.T) {
	work := queue.New(queue.Config{Head: true})
	defer work.Close()
	for _, o := range []queue.Offer{
		{Worker: "for-crimson", Slot: "1", Prefix: "crimson", Properties: []worker.Property{{Name: "pool", Value: "crimson-only"}}},
		{Worker: "for-crimson", Slot: "2", Prefix: "crimson", Properties: []worker.Property{{Name: "pool", Value: "crimson-only"}}},
		{Worker: "for-blue", Slot: "1", Prefix: "blue"},
		{Worker: "for-all", Slot: "1", Properties: []worker.Property{{Name: "pool", Value: "shared"}}},
	} {
		if _, err := work.Join(o); err != nil {
			t.Fatal(err)
		}
	}
	work.DrainWorker("for-crimson", "crimson's kernel")
	work.DrainWorker("for-blue", "blue's kernel")
	work.DrainWorker("for-all", "everybody's kernel")
	for i, r := range []struct{ instance, gpu string }{
		{"crimson", "crimson-gpu"}, {"crimson/team", "both"}, {"blue", "both"}, {"blue", "both"}, {"blue", "blue-gpu"},
	} {
		_, err := work.Submit(queue.Request{Demands: []worker.Property{{Name: "gpu", Value: r.gpu}}, Task: worker.Task{
			Instance: r.instance, Action: cas.SHA256.Sum([]byte{byte(i)})}})
		if err != nil {
			t.Fatal(err)
		}
	}
	told := func(c fleet.Config) *cloisterpb.StatusResponse {
		t.Helper()
		c.Queue = work
		m, err := serve(t, c).Status(t.Context(), &cloisterpb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}

	all := told(fleet.Config{})
	if len(all.Workers) != 3 || len(all.Demands) != 3 || all.Demands[1].Queued != 3 || all.Elsewhere != nil {
		t.Errorf("where everybody may see everything: %v", all)
	}
	m := told(fleet.Config{Viewers: &viewer{"blue"}})
	if text := m.String(); strings.Contains(text, "crimson") {
		t.Errorf("blue is told of crimson: %s", text)
	}
	if len(m.Demands) != 2 || m.Demands[0].Queued != 1 || m.Demands[1].Queued != 2 || len(m.Workers) != 2 {
		t.Errorf("blue is told %v and %v", m.Demands, m.Workers)
	}
	if want := (&cloisterpb.Elsewhere{Queued: 2, Workers: 1, Slots: 2}); !proto.Equal(m.Elsewhere, want) || m.Queued != 5 {
		t.Errorf("blue is told that there is %v elsewhere, of %d, want %v", m.Elsewhere, m.Queued, want)
	}
	// An instance below a worker's prefix is one of those that it takes actions of.
	m = told(fleet.Config{Viewers: &viewer{"crimson/team"}})
	if text := m.String(); strings.Contains(text, "blue") || strings.Contains(text, "crimson-gpu") || !strings.Contains(text, "crimson-only") || len(m.Workers) != 2 {
		t.Errorf("a team of crimson is told %s", text)
	}
}

// TestDrain: the reason names who drained, and a name that nobody has is told with those that there are.
func TestDrain(t *testing.T) {
	work := queue.New(queue.Config{Head: true})
	defer work.Close()
	client := serve(t, fleet.Config{Queue: work, Caller: func(context.Context) string { return "ops" }})
	unknown := func(want string) {
		t.Helper()
		for _, do := range []func(context.Context, *cloisterpb.DrainRequest, ...grpc.CallOption) (*cloisterpb.DrainResponse, error){client.Drain, client.Undrain} {
			_, err := do(t.Context(), &cloisterpb.DrainRequest{Worker: "tongs"})
			if status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), want) {
				t.Errorf("nobody's name: %v, want %q in it", err, want)
			}
		}
	}
	unknown("there is none")
	for _, name := range []string{"anvil", "bellows"} {
		if _, err := work.Join(queue.Offer{Worker: name, Slot: "1"}); err != nil {
			t.Fatal(err)
		}
	}
	unknown(`there are "anvil", "bellows"`)
	for _, reason := range []string{"two\nlines", strings.Repeat("long ", 200)} {
		if _, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: reason}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("the reason %.20q: %v", reason, err)
		}
	}
	if w := work.Workers()[0]; !w.Drained.IsZero() {
		t.Errorf("a refused call has drained: %+v", w)
	}
	for reason, want := range map[string]string{"a kernel": "a kernel (by ops)", "": "(by ops)"} {
		r, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: reason})
		if err != nil || !slices.Equal(r.Workers, []string{"anvil"}) {
			t.Fatal(r, err)
		}
		if w := work.Workers()[0]; w.Drained.IsZero() || w.Why != want {
			t.Errorf("drained for %q, want %q", w.Why, want)
		}
	}
	if w := work.Workers()[1]; !w.Drained.IsZero() {
		t.Error("another worker is drained, too")
	}
	if _, err := client.Undrain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil"}); err != nil || !work.Workers()[0].Drained.IsZero() {
		t.Errorf("undrain: %v", err)
	}
}

// TestDrainsAreKept: each change is told before it is answered, and one that cannot be kept is told to who made it.
func TestDrainsAreKept(t *testing.T) {
	work := queue.New(queue.Config{Head: true})
	defer work.Close()
	if _, err := work.Join(queue.Offer{Worker: "anvil", Slot: "1", Ending: true}); err != nil {
		t.Fatal(err)
	}
	var kept queue.DrainState
	var broken error
	client := serve(t, fleet.Config{Queue: work, Keep: func(s queue.DrainState) error {
		kept = s
		return broken
	}})
	m, err := client.Status(t.Context(), &cloisterpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if s := m.Workers[0].Slots[0]; s.Began == nil || s.Stage != "end" || s.Action != "" {
		t.Errorf("what ends is told as %v", s)
	}
	if _, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil", Reason: "a kernel"}); err != nil || kept.Workers["anvil"].Why != "a kernel" {
		t.Errorf("kept is %+v, %v", kept, err)
	}
	broken = errors.New("no room")
	if _, err := client.Undrain(t.Context(), &cloisterpb.DrainRequest{Worker: "anvil"}); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "no room") {
		t.Errorf("what cannot be kept: %v", err)
	}
	kept = queue.DrainState{Joining: &queue.Drain{}}
	if _, err := client.Drain(t.Context(), &cloisterpb.DrainRequest{Worker: "tongs"}); status.Code(err) != codes.NotFound || kept.Joining == nil {
		t.Errorf("a drain of nobody was kept: %+v, %v", kept, err)
	}
}
