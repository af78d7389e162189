// SPDX-License-Identifier: Apache-2.0

package service_test

import (
	"context"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
)

// recordIgnored records a result of an action whose image was ignored, as a server with this store would.
func recordIgnored(t *testing.T, instances cas.Instances, action *repb.Digest) {
	t.Helper()
	aux := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: "none", IgnoredProperties: []string{"container-image=docker://a/b"}}))(t)
	must.Succeed(t, must.Get(instances(""))(t).Actions.Record(t.Context(), must.Get(cas.FromProto(cas.SHA256, action))(t), &repb.ActionResult{
		ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}},
	}))
}

// TestOnlyServersThatIgnoreImagesServeSuchResults: a result of an action whose image was ignored is a miss on every
// server that does not ignore images itself, whether it runs images or not.
func TestOnlyServersThatIgnoreImagesServeSuchResults(t *testing.T) {
	for name, c := range map[string]struct {
		head, fleet, ignores bool
		want                 codes.Code
	}{
		"a server":                      {want: codes.NotFound},
		"a server that ignores them":    {ignores: true, want: codes.OK},
		"a head":                        {head: true, want: codes.NotFound},
		"a head of a fleet":             {head: true, fleet: true, want: codes.NotFound},
		"a member of a fleet":           {fleet: true, want: codes.NotFound},
		"a member with --images=ignore": {fleet: true, ignores: true, want: codes.NotFound}, // it has no effect
		"a head with --images=ignore":   {head: true, ignores: true, want: codes.NotFound},
	} {
		instances := castest.Instances()
		action := must.Get(cas.PutProto(t.Context(), must.Get(instances(""))(t).Store, cas.SHA256, &repb.Action{}))(t).Proto()
		recordIgnored(t, instances, action)
		config := service.Config{Worker: worker.Config{Name: "w", Instances: instances, Fleet: c.fleet, IgnoreImages: c.ignores}}
		if !c.head {
			config.Worker.Backend, config.Worker.Toolchain = unable{}, []sandbox.Input{}
			config.Worker.Features = sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}}
			config.Worker.Fingerprint = func() string { return "none" }
		}
		server := must.Get(service.NewServer(t.Context(), config))(t)
		defer server.Close()
		g := grpc.NewServer(casserver.ServerOptions(nil)...)
		must.Succeed(t, server.Register(g))
		_, err := repb.NewActionCacheClient(grpctest.Connect(t, g)).GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: action})
		expect.Equal(t, status.Code(err), c.want, "%s", name)
	}
}

// TestFarmDoesNotServeResultsOfIgnoredImages: neither the head nor a worker, which looks up the result as well, serves
// such a result from the shared store.
func TestFarmDoesNotServeResultsOfIgnoredImages(t *testing.T) {
	f := newFarm(t, 0, "version: 1\n")
	image := &repb.Platform_Property{Name: "container-image", Value: "docker://a/b"}
	ran := f.join("namespace", func(c *service.Config) {
		c.Join.Properties = []worker.Property{{Name: image.Name, Value: image.Value}}
	})
	action := f.action("", "cc", image)
	recordIgnored(t, f.instances, action)
	f.want(f.begin(t.Context(), "", action)(), "namespace", false, "an action whose image another server ignored")
	f.want(f.begin(t.Context(), "", action)(), "namespace", true, "again")
	expect.Equal(t, ran.runs.Load(), 1, "runs")
}

// An imageOf provides an image with this root for every name.
type imageOf struct{ root cas.Digest }

func (imageOf) Pin(context.Context, string, string) (string, error) { return "a/b@sha256:1", nil }

func (i imageOf) Root(context.Context, string, string, cas.Digest) (cas.Digest, []string, error) {
	return i.root, nil, nil
}

// TestMovedTagIsAMiss: a lookup does not return a result of the image that a tag named previously.
func TestMovedTagIsAMiss(t *testing.T) {
	instances := castest.Instances()
	in := must.Get(instances(""))(t)
	command := must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.Command{
		Platform: &repb.Platform{Properties: []*repb.Platform_Property{{Name: "container-image", Value: "docker://a/b:tag"}}},
	}))(t)
	action := must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.Action{CommandDigest: command.Proto()}))(t)
	server := must.Get(service.NewServer(t.Context(), service.Config{Worker: worker.Config{
		Name: "w", Instances: instances, Backend: unable{}, Toolchain: []sandbox.Input{}, Fingerprint: func() string { return "none" },
		Features: sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}, Root: true}, Images: imageOf{}, CacheUnpinned: true,
	}}))(t)
	defer server.Close()
	g := grpc.NewServer(casserver.ServerOptions(nil)...)
	must.Succeed(t, server.Register(g))
	client := repb.NewActionCacheClient(grpctest.Connect(t, g))
	for image, want := range map[string]codes.Code{"a/b@sha256:1": codes.OK, "a/b@sha256:2": codes.NotFound} {
		aux := must.Get(anypb.New(&cloisterpb.Execution{Image: image, Unpinned: true}))(t)
		must.Succeed(t, in.Actions.Record(t.Context(), action, &repb.ActionResult{
			ExecutionMetadata: &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}},
		}))
		_, err := client.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: action.Proto()})
		expect.Equal(t, status.Code(err), want, "a result of %s: %v", image, err)
	}
}

// TestDefaultImageRunsOnAWorkerWithImages: an action whose image only the workers' policy names goes to a worker that
// runs images after one that runs none has refused it.
func TestDefaultImageRunsOnAWorkerWithImages(t *testing.T) {
	f := newFarm(t, 0, "version: 1\n")
	byDefault := func(c *service.Config) {
		c.Worker.Policy = must.Get(policy.Parse("policy.yaml", []byte(
			"version: 1\ndefault_properties: {main: {container-image: \"docker://a/b@sha256:1\"}}\n")))(t)
	}
	without := f.join("namespace", byDefault)
	action := f.action("main", "cc")
	stream := must.Get(repb.NewExecutionClient(f.clients).Execute(t.Context(), &repb.ExecuteRequest{InstanceName: "main", ActionDigest: action}))(t)
	for stage := repb.ExecutionStage_UNKNOWN; stage != repb.ExecutionStage_EXECUTING; { // the worker without images has it
		var meta repb.ExecuteOperationMetadata
		must.Succeed(t, must.Get(stream.Recv())(t).GetMetadata().UnmarshalTo(&meta))
		stage = meta.Stage
	}
	root := must.Get(cas.PutProto(t.Context(), must.Get(f.instances("main"))(t).Store, cas.SHA256, &repb.Directory{}))(t)
	with := f.join("images", byDefault, func(c *service.Config) {
		c.Worker.Images, c.Worker.Features.Root, c.Join.Properties = imageOf{root}, true, nil
	})
	r := f.begin(t.Context(), "main", action)() // merged with the first request
	expect.Equal(t, codes.Code(r.Status.GetCode()), codes.OK, "%s", r.Status.GetMessage())
	expect.Equal(t, without.runs.Load(), 0, "runs on the worker without images")
	expect.Equal(t, with.runs.Load(), 1, "runs on the worker with images")
}
