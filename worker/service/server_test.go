// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// TestMistakesAreNamed: each mistake in a Config is an error that names the field.
func TestMistakesAreNamed(t *testing.T) {
	head := service.Config{Worker: worker.Config{Name: "head", Instances: castest.Instances()}}
	permits := must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n")))(t)
	for want, change := range map[string]func(*service.Config){
		"Config.Name":      func(c *service.Config) { c.Worker.Name = "" },
		"Config.Instances": func(c *service.Config) { c.Worker.Instances = nil },
		"Config.Slots":     func(c *service.Config) { c.Slots = -1 },
		"Config.Memory":    func(c *service.Config) { c.Memory = 1 },
		"Config.Workers.Toolchain": func(c *service.Config) {
			c.Worker.Backend, c.Workers.Toolchain = unable{}, "gcc 14"
		},
		"Config.Actions": func(c *service.Config) { // calls of actions would have all rights
			c.Worker.Backend, c.Worker.Policy, c.Access = unable{}, permits, struct{ service.Access }{}
			c.Worker.Features = sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}}
		},
		"Config.Sampler": func(c *service.Config) { c.Sampler = &repro.SamplerConfig{} },
		"Config.Metrics": func(c *service.Config) {
			r := prometheus.NewRegistry()
			r.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "cloister_actions_queued"}))
			c.Metrics = r
		},
	} {
		c := head
		change(&c)
		if s, err := service.NewServer(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, %v, want an error that names %s", s, err, want)
		}
	}
	conn := &grpc.ClientConn{}
	expect.Message(t, expect.Err(service.NewWorker(t.Context(), conn, head)), "Worker.Backend")
	able := head
	able.Worker.Backend, able.Worker.Features = unable{}, sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}}
	expect.Message(t, expect.Err(service.NewWorker(t.Context(), nil, able)), "connection")
	s := must.Get(service.NewServer(t.Context(), able))(t)
	defer s.Close()
	expect.Message(t, s.RegisterWorkers(grpc.NewServer()), "Worker.Fleet")
	for name, register := range map[string]func(grpc.ServiceRegistrar) error{"Register": s.Register, "RegisterWorkers": s.RegisterWorkers} {
		expect.Message(t, register(nil), "gRPC server", "%s of nil", name)
	}
}

// unable is a backend that runs nothing.
type unable struct{ sandbox.Backend }

// TestUnusableSandboxIsAnError that says why, before anything is served.
func TestUnusableSandboxIsAnError(t *testing.T) {
	c := service.Config{Worker: worker.Config{Name: "w", Instances: castest.Instances(), Backend: broken{}}}
	if s, err := service.NewServer(t.Context(), c); err == nil || !strings.Contains(err.Error(), "cannot sandbox actions") {
		t.Errorf("got %v, %v", s, err)
	}
}

// broken is a backend that this host does not support.
type broken struct{ sandbox.Backend }

func (broken) Probe(context.Context) (sandbox.Features, error) {
	return sandbox.Features{}, sandbox.ErrUnsupported
}

// TestMetricsOfServersAreApart: two servers of one program have registries of their own, and without one need none.
func TestMetricsOfServersAreApart(t *testing.T) {
	registry := prometheus.NewRegistry()
	for _, r := range []prometheus.Registerer{nil, nil, registry} {
		s := must.Get(service.NewServer(t.Context(), service.Config{
			Worker: worker.Config{Name: "head", Instances: castest.Instances()}, Metrics: r,
		}))(t)
		defer s.Close()
	}
	names, err := registry.Gather()
	expect.That(t, err == nil && len(names) != 0, "got %d metrics, %v", len(names), err)
}

// TestCloseTwice: a second Close does nothing, and neither does a Drain after it.
func TestCloseTwice(t *testing.T) {
	s, err := service.NewServer(t.Context(), service.Config{Worker: worker.Config{Name: "head", Instances: castest.Instances()}})
	must.Succeed(t, err)
	g := grpc.NewServer()
	must.Succeed(t, s.Register(g))
	g.Stop()
	for range 2 {
		must.Succeed(t, s.Close())
	}
	must.Succeed(t, s.Drain(t.Context()))
}

// A registrar is not a grpc.Server.
type registrar map[string]any

func (r registrar) RegisterService(d *grpc.ServiceDesc, service any) { r[d.ServiceName] = service }

// TestAnyRegistrarWillDo: the services need no grpc.Server.
func TestAnyRegistrarWillDo(t *testing.T) {
	s, err := service.NewServer(t.Context(), service.Config{Worker: worker.Config{Name: "head", Instances: castest.Instances()}})
	must.Succeed(t, err)
	defer s.Close()
	clients, workers := registrar{}, registrar{}
	if err := errors.Join(s.Register(clients), s.RegisterWorkers(workers)); err != nil || len(clients) != 8 || len(workers) != 5 {
		t.Errorf("got %d services for clients and %d for workers, %v, want 8 and 5", len(clients), len(workers), err)
	}
}

// TestScrapeDoesNotVisitSlots: the cost of a scrape does not grow with the number of slots, and it counts the workers by
// their states.
func TestScrapeDoesNotVisitSlots(t *testing.T) {
	registry := prometheus.NewRegistry()
	s := must.Get(service.NewServer(t.Context(), service.Config{
		Worker: worker.Config{Name: "head", Instances: castest.Instances()}, Metrics: registry,
	}))(t)
	defer s.Close()
	join := func(name string, slots int) (joined []*queue.Slot) {
		for i := range slots {
			joined = append(joined, must.Get(s.Queue().Join(queue.Offer{Worker: name, Slot: fmt.Sprint(i)}))(t))
		}
		return joined
	}
	scrape := func() uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		must.Get(registry.Gather())(t)
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	join("one", 1)
	few := scrape()
	join("many", 2000)
	if many := scrape(); many > few+100<<10 {
		t.Errorf("a scrape allocates %d bytes with 1 slot and %d with 2,001", few, many)
	}
	s.Queue().DrainWorker("many", "test")
	for _, slot := range join("gone", 1) {
		slot.Leave("test")
	}
	got := map[string]float64{}
	for _, family := range must.Get(registry.Gather())(t) {
		if family.GetName() == "cloister_workers" {
			for _, m := range family.Metric {
				got[m.Label[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	if want := (map[string]float64{"working": 1, "drained": 1, "gone": 1}); !maps.Equal(got, want) {
		t.Errorf("got workers %v, want %v", got, want)
	}
}
