// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/worker/access"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// serveWorkers starts a server with the services of the workers' port over an in-memory store.
func serveWorkers(t *testing.T, rules *access.Rules) *server {
	t.Helper()
	g := grpc.NewServer(append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), rules.WorkerOptions()...)...)
	casserver.Register(g, casserver.Config{Instances: castest.Instances(), Rights: rules.WorkerRights})
	remoteworkerpb.RegisterOperationQueueServer(g, remoteworkerpb.UnimplementedOperationQueueServer{})
	healthpb.RegisterHealthServer(g, health.NewServer())
	return &server{t, grpctest.Listen(t, g), g.GetServiceInfo()}
}

func synchronize(ctx context.Context, conn *grpc.ClientConn, prefix string) error {
	_, err := remoteworkerpb.NewOperationQueueClient(conn).Synchronize(ctx, &remoteworkerpb.SynchronizeRequest{InstanceNamePrefix: prefix})
	return err
}

// served selects the calls that the workers' port serves.
var served = strings.Fields("GetCapabilities FindMissingBlobs BatchReadBlobs BatchUpdateBlobs GetTree Read Write QueryWriteStatus GetActionResult UpdateActionResult")

// TestWorkersPort checks that at the workers' port the right work permits everything in its instances and no other
// right permits anything, and that work permits nothing at the clients' port.
func TestWorkersPort(t *testing.T) {
	rules := parse(t, `
version: 1
callers:
  - {name: worker, token_sha256: `+sum("work")+`, rights: [{work: [main, team/*]}]}
  - {name: client, token_sha256: `+sum("client")+`, rights: [read, write, cache, execute]}
`)
	s := serveWorkers(t, rules)
	expect.Error(t, access.CheckWorkers(s.info), nil)
	expect.Message(t, access.Check(s.info), "OperationQueue", "the clients' port has the queue of workers")
	worker, client, clients := s.dial(nil, "Bearer work"), s.dial(nil, "Bearer client"), serve(t, rules, nil)
	for _, name := range served {
		for _, instance := range []string{"main", "team/a"} {
			if err := calls[name](t.Context(), worker, instance); !passed(err) {
				t.Errorf("%s of a worker in %s: %v", name, instance, err)
			}
			expect.Code(t, calls[name](t.Context(), client, instance), codes.PermissionDenied,
				"%s of a client at the workers' port", name)
		}
		if err := calls[name](t.Context(), worker, "other"); passed(err) && name != "GetCapabilities" {
			t.Errorf("%s of a worker in another instance passes", name)
		}
		expect.Code(t, calls[name](t.Context(), s.dial(nil, ""), "main"), codes.Unauthenticated, "%s of nobody", name)
		expect.That(t, !passed(calls[name](t.Context(), clients.dial(nil, "Bearer work"), "main")),
			"%s of a worker at the clients' port passes", name)
	}
	expect.Code(t, synchronize(t.Context(), s.dial(nil, ""), "main"), codes.Unauthenticated, "work for nobody")
	if _, err := healthpb.NewHealthClient(s.dial(nil, "")).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("health: %v", err)
	}
}

// TestWorkOfAPrefix checks that a worker for all instances below a prefix needs the right in all of them.
func TestWorkOfAPrefix(t *testing.T) {
	s := serveWorkers(t, parse(t, `
version: 1
callers:
  - {name: one, token_sha256: `+sum("one")+`, rights: [{work: main}]}
  - {name: below, token_sha256: `+sum("below")+`, rights: [{work: main/*}]}
  - {name: both, token_sha256: `+sum("both")+`, rights: [{work: [main, main/*]}]}
  - {name: unnamed, token_sha256: `+sum("unnamed")+`, rights: [{work: ""}]}
  - {name: all, token_sha256: `+sum("all")+`, rights: [work]}
`))
	for token, prefixes := range map[string]map[string]bool{
		"one":     {"": false, "main": false, "main/a": false, "other": false},
		"below":   {"": false, "main": false, "main/a": true, "main/a/b": true, "mainly": false},
		"both":    {"": false, "main": true, "main/a": true, "mainly": false},
		"unnamed": {"": false, "main": false},
		"all":     {"": true, "main": true, "main/a": true},
	} {
		for prefix, want := range prefixes {
			if err := synchronize(t.Context(), s.dial(nil, "Bearer "+token), prefix); passed(err) != want {
				t.Errorf("prefix %q for %s: %v", prefix, token, err)
			}
		}
	}
}
