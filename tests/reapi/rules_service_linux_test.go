// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"slices"
	"sync"
	"syscall"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// serviceRules are the rules about the server itself.
var serviceRules = []rule{
	{129, "service", "health and reflection", anything, healthAndReflection},
	{130, "service", "draining and the second signal", ownServer, draining},
	{131, "service", "callers and their rights", ownServer, callersRights},
	{132, "service", "kill -9 and lost blobs", ownServer, crashesAndLostBlobs},
}

// serving returns the health of a service.
func (c *client) serving(service string) (healthpb.HealthCheckResponse_ServingStatus, error) {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	r, err := healthpb.NewHealthClient(c.conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	return r.GetStatus(), err
}

func (c *client) drains() bool {
	s, err := c.serving("")
	return err == nil && s == healthpb.HealthCheckResponse_NOT_SERVING
}

func healthAndReflection(c *client) {
	services := []string{""}
	if c.ours {
		services = []string{"", "build.bazel.remote.execution.v2.Execution", "google.bytestream.ByteStream"}
	}
	for _, service := range services {
		expect.Equal(c, must.Get(c.serving(service))(c), healthpb.HealthCheckResponse_SERVING, "health of %q", service)
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	s, err := reflectionpb.NewServerReflectionClient(c.conn).ServerReflectionInfo(ctx)
	var r *reflectionpb.ServerReflectionResponse
	if err == nil {
		if err = s.Send(&reflectionpb.ServerReflectionRequest{
			MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{ListServices: "*"},
		}); err == nil {
			r, err = s.Recv()
		}
	}
	var names []string
	for _, service := range r.GetListServicesResponse().GetService() {
		names = append(names, service.GetName())
	}
	expect.That(c, err == nil && slices.Contains(names, "build.bazel.remote.execution.v2.ContentAddressableStorage"),
		"reflection: got the services %q, %v", names, err)
}

func draining(c *client) {
	drainLetsEnd(c.own(bazelrun.ServerConfig{Jobs: 2}))
	secondSignal(c.own(bazelrun.ServerConfig{Jobs: 2}))
}

// stop stops the server and returns a channel for the result.
func (c *client) stop() <-chan error {
	*c.ended = true
	stopped := make(chan error, 1)
	go func() { stopped <- c.server.Stop() }()
	return stopped
}

// drainLetsEnd checks that after SIGTERM running actions complete and new ones must be retried.
func drainLetsEnd(c *client) {
	c.put(fresh(10)) // so that the store is not empty
	_, s, leave := c.begin(c.prepare(job{steps: []string{"sleep 4s", "write out done"}, outputs: []string{"out"}}))
	defer leave()
	later := c.prepare(job{steps: []string{"say later"}})
	stopped := c.stop()
	must.Hold(c, "draining", c.drains)
	if a := c.request(later, nil); a.code() != codes.Unavailable {
		c.Errorf("a new action while draining: got %v, want UNAVAILABLE", a.err)
	}
	r := c.wantResult("the running action", answered(s, nil)).Result // the server has stopped by now
	if out := r.GetOutputFiles(); r.GetExitCode() != 0 || len(out) != 1 || out[0].GetDigest().GetHash() != cas.SHA256.Sum([]byte("done")).Hash() {
		c.Errorf("the running action: got %v", r)
	}
	expect.Error(c, <-stopped, nil, "after draining")
}

// secondSignal checks that a second signal stops the server despite running actions.
func secondSignal(c *client) {
	sleep := mark()
	_, s, leave := c.begin(c.prepare(job{steps: []string{"sleep " + sleep}}))
	defer leave()
	alive := func() bool { return len(sandboxtest.Running(c, "sleep "+sleep)) > 0 }
	must.Hold(c, "running", alive)
	stopped := c.stop()
	must.Hold(c, "draining", c.drains)
	must.Succeed(c, syscall.Kill(c.server.PID, syscall.SIGTERM))
	if a := answered(s, nil); a.code() != codes.Unavailable {
		c.Errorf("the action: got %v, want UNAVAILABLE, so that the client retries", a.err)
	}
	must.Hold(c, "ended with the server", func() bool { return !alive() })
	expect.Error(c, <-stopped, nil, "after the second signal")
}

func crashesAndLostBlobs(c *client) {
	// Kill the server at any moment of an execution, while others run and store outputs.
	for what, stage := range map[string]repb.ExecutionStage_Value{
		"when an action has come": repb.ExecutionStage_CACHE_CHECK, "when one runs": repb.ExecutionStage_EXECUTING, "when five have ended": repb.ExecutionStage_COMPLETED,
	} {
		c.killed(what, stage)
	}
	c.damaged()
}

// killed checks that everything acknowledged survives kill -9, and that nothing is incomplete.
func (c *client) killed(what string, stage repb.ExecutionStage_Value) {
	c.Helper()
	const actions = 16
	before := c.own(bazelrun.ServerConfig{Jobs: 2})
	var todo []*repb.Digest
	for range actions {
		todo = append(todo, before.prepare(job{steps: []string{
			"random 300000 d/1", "random 300000 d/2", "random 3000 d/3", "random 300000 d/4", "random 300000 d/5", "say x",
		}, files: map[string]file{"d/": {}}, outputs: []string{"d"}}))
	}
	var (
		mu           sync.Mutex
		acknowledged = map[*repb.Digest]*repb.ActionResult{} // guarded by mu
		all          sync.WaitGroup
		moment       = make(chan struct{})
		once         sync.Once
	)
	for _, d := range todo {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(c.Context(), executeTime)
			defer cancel()
			s, err := before.open(ctx, d, nil)
			if err != nil {
				return
			}
			if stage != repb.ExecutionStage_COMPLETED && awaitStage(s, stage) {
				once.Do(func() { close(moment) })
			}
			if a := answered(s, nil); a.err == nil {
				mu.Lock()
				defer mu.Unlock()
				if acknowledged[d] = a.response.GetResult(); len(acknowledged) == 5 {
					once.Do(func() { close(moment) })
				}
			}
		})
	}
	select {
	case <-moment:
	case <-time.After(time.Minute):
		c.Errorf("%s: the moment was not reached", what)
	}
	before.kill()
	all.Wait()

	after := c.own(bazelrun.ServerConfig{Jobs: 2, Dir: before.dir})
	for _, d := range todo {
		got, err := after.recorded(d)
		if want := acknowledged[d]; want != nil && (err != nil || !proto.Equal(got, want)) {
			c.Errorf("%s: got result %v before the restart, and %v, %v after it, want the same", what, want, got, err)
		}
		if err == nil {
			for _, b := range after.blobsOf(got) {
				after.get(b) // checks the digest
			}
		}
		after.wantResult(what+", after the restart", after.request(d, nil))
	}
}

// damaged checks that builds succeed although blobs are lost and corrupted.
func (c *client) damaged() {
	c.Helper()
	const actions = 12
	s := c.own(bazelrun.ServerConfig{Jobs: 2})
	var jobs []job
	for range actions {
		jobs = append(jobs, job{
			steps: []string{"copy in/a a", "copy in/b b"}, outputs: []string{"a", "b"}, same: true,
			files: map[string]file{"in/a": {text: string(fresh(2_000_000))}, "in/b": {text: string(fresh(5_000))}},
		})
	}
	build := func(s *client) {
		for _, j := range jobs {
			s.buildLikeBazel(j)
		}
	}
	build(s)
	rnd := seeded(132)
	for range 2 {
		must.Succeed(c, bazelrun.LoseFiles(s.dir, rnd, 0.4))
		build(s)
	}
	// A server reads a verified blob only once, so corrupt blobs between two runs.
	must.Succeed(c, <-s.stop())
	if _, _, err := bazelrun.DamageFiles(s.dir, rnd, 0.4); err != nil {
		c.Fatal(err)
	}
	must.Get(bazelrun.DamageSegments(s.dir, rnd, 0.2))(c)
	build(c.own(bazelrun.ServerConfig{Jobs: 2, Dir: s.dir}))
}

// buildLikeBazel repeats an action that copies its inputs, like Bazel, until its outputs are complete and correct.
func (c *client) buildLikeBazel(j job) {
	c.Helper()
	skip := false
	var why []string
	for range 8 {
		d := c.prepare(j) // uploads all blobs, which is cheap if they are present
		a := c.request(d, func(r *repb.ExecuteRequest) { r.SkipCacheLookup = skip })
		if a.err != nil {
			// Bazel retries missing blobs after another upload, and transient errors.
			if _, err := missingOf(a.err); err != nil && !slices.Contains([]codes.Code{
				codes.Unavailable, codes.Internal, codes.ResourceExhausted, codes.Aborted, codes.Unknown, codes.Canceled, codes.DeadlineExceeded,
			}, a.code()) {
				c.Fatalf("Execute of a build with lost blobs: %v", a.err)
			}
			why = append(why, a.err.Error())
			continue
		}
		if n := a.response.GetResult().GetExitCode(); n != 0 {
			c.Fatalf("an action failed with exit code %d because of lost blobs: %s", n, a.response.GetMessage())
		}
		lost := false
		for _, f := range a.response.GetResult().GetOutputFiles() {
			text, err := c.download(f.GetDigest())
			if status.Code(err) == codes.NotFound {
				lost = true
			} else if err != nil || text != j.files["in/"+f.GetPath()].text {
				c.Fatalf("output %s: got %d bytes, %v, want those of the input", f.GetPath(), len(text), err)
			}
		}
		if !lost {
			return
		}
		why = append(why, "an output is lost")
		skip = true // Bazel rebuilds outputs that it cannot download
	}
	c.Fatalf("a build with lost blobs did not complete: %q", why)
}
