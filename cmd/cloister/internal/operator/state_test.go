// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// aFleet is the state of a head with a worker of each kind.
func aFleet() *cloisterpb.StatusResponse {
	now := time.Date(2026, 11, 22, 4, 5, 6, 0, time.UTC)
	ago := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }
	return &cloisterpb.StatusResponse{
		Name: "head", Version: "0.1.0", Time: timestamppb.New(now), Started: ago(26 * time.Hour),
		Unready: []string{"full since 2026-11-22T04:00:00Z: caf\u00e9\x1b[2J"}, Notes: []string{"3 blobs wait"},
		Queued: 12, Running: 2, Oldest: durationpb.New(34 * time.Second), Done: 120, Cached: 90, Failed: 3, Again: 1,
		Demands: []*cloisterpb.Demand{
			{Queued: 8},
			{Queued: 4, Properties: []string{"OSFamily=linux", "container-image=docker://x y"}, Unmet: `no worker offers container-image="docker://x y"`},
		},
		Workers: []*cloisterpb.Worker{
			{
				Name: "a", InstanceNamePrefix: "main", Properties: []string{"OSFamily=linux"}, Done: 100, Lost: 1, Seen: ago(4 * time.Minute),
				Slots: []*cloisterpb.Slot{
					{Name: "0", Action: "9f2c/142", InstanceName: "main", TargetId: "//foo:bar baz", ActionMnemonic: "CppCompile", Began: ago(12300 * time.Millisecond), Stage: "run"},
					{Name: "1"},
				},
			},
			{Name: "b", Drained: ago(5 * time.Minute), Reason: "a new\nkernel", Slots: []*cloisterpb.Slot{{Name: "0", Began: ago(time.Second)}}},
			{Name: "c", Drained: ago(2 * time.Hour), Slots: []*cloisterpb.Slot{{Name: "0"}}},
			{Name: "d", Gone: ago(3 * time.Minute), Lost: 2},
		},
	}
}

// The whole output of status, without control characters from others.
func TestStatusText(t *testing.T) {
	got := strings.Join(stateOf(aFleet()).Lines(), "\n") + "\n"
	const want = `head  cloister 0.1.0  up 1d2h  NOT READY
         full since 2026-11-22T04:00:00Z: caf\u00e9\x1b[2J
         3 blobs wait
queue    12 waiting (the oldest for 34s), 2 running on 4 slots, 120 done, 90 hits, 3 errors, 1 run again
         8 for any worker
         4 for OSFamily=linux 'container-image=docker://x y': no worker offers container-image="docker://x y"
WORKER  STATE         BUSY      DONE  LOST
a       working        1/2       100     1  instances main, OSFamily=linux, silent for 4m00s
  0    run          12s  'CppCompile //foo:bar baz'  9f2c/142  main
b       draining       1/1         0     0  since 5m00s: a new\nkernel
  0    -           1.0s  an action of an instance that you may not execute in
c       drained        0/1         0     0  since 2h00m
d       gone           0/0         0     2  since 3m00s
`
	expect.Equal(t, got, want)
	idle := stateOf(&cloisterpb.StatusResponse{Name: "head", Version: "0.1.0", Time: timestamppb.Now(), Started: timestamppb.Now()})
	const none = "head  cloister 0.1.0  up 0.0s  ready\nqueue    0 waiting, 0 running on 0 slots, 0 done, 0 hits, 0 errors\nworkers  none"
	expect.Equal(t, strings.Join(idle.Lines(), "\n"), none)
}

// Instances that the caller cannot see appear as totals.
func TestStatusOfOtherInstances(t *testing.T) {
	m := &cloisterpb.StatusResponse{
		Name: "head", Version: "0.1.0", Time: timestamppb.Now(), Started: timestamppb.Now(), Queued: 3, Running: 2,
		Elsewhere: &cloisterpb.Elsewhere{Queued: 3, Workers: 2, Slots: 8, Busy: 2},
	}
	const none = "head  cloister 0.1.0  up 0.0s  ready\nqueue    3 waiting (the oldest for 0.0s), 2 running on 8 slots, 0 done, 0 hits, 0 errors\n" +
		"         3 of instances that you may not execute in\nworkers  2 of instances that you may not execute in, 2/8 busy"
	expect.Equal(t, strings.Join(stateOf(m).Lines(), "\n"), none)
	m.Workers = []*cloisterpb.Worker{{Name: "a", Slots: []*cloisterpb.Slot{{Name: "1"}}}}
	got := stateOf(m).Lines()
	if last := got[len(got)-1]; !strings.Contains(got[1], " 9 slots") || last != "and 2 of instances that you may not execute in, 2/8 busy" {
		t.Errorf("with one worker of the caller's:\n%s", strings.Join(got, "\n"))
	}
	f := frame{State: stateOf(m)}
	if got := f.summary(); !strings.HasSuffix(got, "workers: 1 working, 2 of other instances") {
		t.Errorf("top: %s", got)
	}
	b, err := json.Marshal(stateOf(m))
	expect.That(t, err == nil && strings.Contains(string(b), `"elsewhere":{"queued":3,"workers":2,"slots":8,"busy":2}`),
		"%s, %v", b, err)
}

// TestStatusOfALargeFarm checks that the client accepts a status beyond gRPC's default limit of 4 MiB.
func TestStatusOfALargeFarm(t *testing.T) {
	head, err := service.NewServer(t.Context(), service.Config{Worker: worker.Config{Name: "head", Instances: castest.Instances()}})
	must.Succeed(t, err)
	t.Cleanup(func() { head.Close() })
	address := grpctest.Serve(t, func(s *grpc.Server) { must.Succeed(t, head.Register(s)) })
	const slots = 10_000
	for i := range slots {
		text := fmt.Sprintf("%0500d", i)
		must.Get(head.Queue().Submit(queue.Request{Task: worker.Task{Action: cas.SHA256.Sum([]byte(text)), Target: text}}))(t)
		slot := must.Get(head.Queue().Join(queue.Offer{Worker: fmt.Sprint(i / 100), Slot: fmt.Sprint(i)}))(t)
		must.Get(slot.Take(t.Context()))(t)
	}
	var fleet Fleet
	fleet.Server.Address = "grpc://" + address
	must.Succeed(t, fleet.Connect(func(c cloisterpb.FleetClient) error {
		s, err := fleet.Status(t.Context(), c)
		if err == nil {
			expect.Equal(t, s.Running, slots, "running actions")
		}
		return err
	}))
}

// The JSON has stable names and plain numbers.
func TestStatusJSON(t *testing.T) {
	b := must.Get(json.Marshal(stateOf(aFleet())))(t)
	var s struct {
		Ready   *bool
		Up      float64 `json:"up_seconds"`
		Queued  int
		Oldest  float64 `json:"oldest_seconds"`
		Workers []struct {
			Name, State, Reason string
			Since               float64 `json:"state_seconds"`
			Slots, Busy         int
			Running             []map[string]any
		}
	}
	must.Succeed(t, json.Unmarshal(b, &s))
	if s.Ready == nil || *s.Ready || s.Up != 26*3600 || s.Queued != 12 || s.Oldest != 34 || len(s.Workers) != 4 {
		t.Errorf("%s", b)
	}
	for i, want := range []string{"working", "draining", "drained", "gone"} {
		if w := s.Workers[i]; w.State != want {
			t.Errorf("worker %s is %s, want %s", w.Name, w.State, want)
		}
	}
	if w := s.Workers[1]; w.Since != 300 || w.Reason != "a new\nkernel" || w.Busy != 1 {
		t.Errorf("the one that is drained: %+v", w)
	}
	if r := s.Workers[0].Running; len(r) != 1 || r[0]["action"] != "9f2c/142" || r[0]["for_seconds"] != 12.3 || r[0]["target"] != "//foo:bar baz" {
		t.Errorf("what runs: %v", r)
	}
}

// Without a terminal, top prints one line.
func TestTopLine(t *testing.T) {
	f := frame{State: stateOf(aFleet()), rate: 2.5, rated: true}
	const want = `NOT READY (full since 2026-11-22T04:00:00Z: caf\u00e9\x1b[2J); ` +
		"12 waiting (the oldest for 34s), 2 running on 4 slots, 120 done, 90 hits, 3 errors, 1 run again; workers: 1 working, 1 draining, 1 drained, 1 gone; 2.5/s"
	expect.Equal(t, f.summary(), want)
}
