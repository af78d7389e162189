// SPDX-License-Identifier: Apache-2.0

// Command bbscheduler is Buildbarn's bb_scheduler configured by flags: Execution and Capabilities for clients,
// OperationQueue for workers, BuildQueueState for operators, all on one address. Like bb_storage in front of a farm, it
// also forwards calls for blobs and results. It only configures Buildbarn's packages.
package main

import (
	"context"
	"errors"
	"flag"
	"time"

	remoteexecution "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	re_blobstore "github.com/buildbarn/bb-remote-execution/pkg/blobstore"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/buildqueuestate"
	schedulerpb "github.com/buildbarn/bb-remote-execution/pkg/proto/configuration/scheduler"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/remoteworker"
	"github.com/buildbarn/bb-remote-execution/pkg/scheduler"
	"github.com/buildbarn/bb-remote-execution/pkg/scheduler/routing"
	"github.com/buildbarn/bb-storage/pkg/auth"
	"github.com/buildbarn/bb-storage/pkg/blobstore/configuration"
	"github.com/buildbarn/bb-storage/pkg/blobstore/grpcservers"
	"github.com/buildbarn/bb-storage/pkg/capabilities"
	"github.com/buildbarn/bb-storage/pkg/clock"
	"github.com/buildbarn/bb-storage/pkg/digest"
	"github.com/buildbarn/bb-storage/pkg/global"
	bb_grpc "github.com/buildbarn/bb-storage/pkg/grpc"
	"github.com/buildbarn/bb-storage/pkg/program"
	"github.com/cloister-build/cloister/tests/interop/peers/bbremote/wiring"
	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// readChunk is the chunk size of ByteStream reads in bytes, as in bb_storage.
const readChunk = 1 << 16

// A config holds the values of the flags.
type config struct {
	listen, metrics, store string
	queue                  scheduler.InMemoryBuildQueueConfiguration
	idle                   time.Duration
	// A queue that exists before its workers.
	declare   bool
	instance  string
	platform  wiring.Pairs
	sizeClass uint
}

func main() {
	var c config
	flag.StringVar(&c.listen, "listen", "127.0.0.1:8983", "address and port of all gRPC services")
	flag.StringVar(&c.metrics, "metrics", "", "address and port of /metrics; empty: none")
	flag.StringVar(&c.store, "store", "", "address and port of the server with blobs and results")
	flag.DurationVar(&c.queue.ExecutionUpdateInterval, "update", time.Minute, "interval of updates to waiting clients")
	flag.DurationVar(&c.queue.OperationWithNoWaitersTimeout, "no-waiters", time.Minute, "how long an operation without waiting clients is kept")
	flag.DurationVar(&c.queue.PlatformQueueWithNoWorkersTimeout, "no-workers", 15*time.Minute, "how long a queue without workers is kept, and clients without a queue are asked to retry after the start")
	flag.DurationVar(&c.queue.BusyWorkerSynchronizationInterval, "busy", 10*time.Second, "interval of reports from busy workers")
	flag.DurationVar(&c.idle, "idle", time.Minute, "how long the call of an idle worker waits")
	flag.IntVar(&c.queue.WorkerTaskRetryCount, "retries", 9, "number of times a task may be sent to a worker again")
	flag.DurationVar(&c.queue.WorkerWithNoSynchronizationsTimeout, "worker-timeout", time.Minute, "how long a worker may be silent")
	flag.BoolVar(&c.declare, "declare", false, "create a queue at the start, with size classes up to -size-class")
	flag.StringVar(&c.instance, "instance", "", "instance name prefix of that queue")
	flag.Var(&c.platform, "property", "platform property NAME=VALUE of that queue")
	flag.UintVar(&c.sizeClass, "size-class", 0, "largest size class of that queue")
	flag.Parse()
	c.queue.GetIdleWorkerSynchronizationInterval = func() time.Duration { return c.idle }
	program.RunMain(func(_ context.Context, siblings, dependencies program.Group) error {
		if c.store == "" || flag.NArg() > 0 {
			return errors.New("usage: bbscheduler -store HOST:PORT [flags]; -h lists them")
		}
		return c.serve(siblings, dependencies)
	})
}

// serve starts the servers; the groups run them.
func (c *config) serve(siblings, dependencies program.Group) error {
	lifecycle, clients, err := global.ApplyConfiguration(wiring.Global(c.metrics))
	if err != nil {
		return err
	}
	store := wiring.Store(c.store)
	cas, err := configuration.NewBlobAccessFromConfiguration(dependencies, store.ContentAddressableStorage,
		configuration.NewCASBlobAccessCreator(clients, wiring.MaxMessage))
	if err != nil {
		return err
	}
	ac, err := configuration.NewBlobAccessFromConfiguration(dependencies, store.ActionCache,
		configuration.NewACBlobAccessCreator(&cas, clients, wiring.MaxMessage))
	if err != nil {
		return err
	}
	// Missing blobs become precondition violations, upon which clients upload again.
	actions := re_blobstore.NewExistencePreconditionBlobAccess(cas.BlobAccess)
	router, err := routing.NewActionRouterFromConfiguration(route, actions, wiring.MaxMessage, nil)
	if err != nil {
		return err
	}
	everybody := auth.NewStaticAuthorizer(func(digest.InstanceName) bool { return true })
	queue := scheduler.NewInMemoryBuildQueue(actions, clock.SystemClock, uuid.NewRandom, &c.queue, wiring.MaxMessage,
		router, everybody, everybody, everybody)
	if c.declare {
		instance, err := digest.NewInstanceName(c.instance)
		if err != nil {
			return err
		}
		if err := queue.RegisterPredeclaredPlatformQueue(instance, c.platform.Platform(), nil, 0, 0, uint32(c.sizeClass)); err != nil {
			return err
		}
	}
	err = bb_grpc.NewServersFromConfigurationAndServe(wiring.Server(c.listen), func(registrar grpc.ServiceRegistrar) {
		s := registrar.(*grpc.Server) // required by the generated code
		remoteexecution.RegisterExecutionServer(s, queue)
		remoteexecution.RegisterCapabilitiesServer(s, capabilities.NewServer(
			capabilities.NewMergingProvider([]capabilities.Provider{cas.BlobAccess, ac.BlobAccess, queue})))
		remoteworker.RegisterOperationQueueServer(s, queue)
		buildqueuestate.RegisterBuildQueueStateServer(s, queue)
		remoteexecution.RegisterContentAddressableStorageServer(s, grpcservers.NewContentAddressableStorageServer(cas.BlobAccess, wiring.MaxMessage))
		bytestream.RegisterByteStreamServer(s, grpcservers.NewByteStreamServer(cas.BlobAccess, readChunk))
		remoteexecution.RegisterActionCacheServer(s, grpcservers.NewActionCacheServer(ac.BlobAccess, wiring.MaxMessage))
	}, siblings)
	if err != nil {
		return err
	}
	lifecycle.MarkReadyAndWait(siblings)
	return nil
}

// route selects an action's queue by the platform in the action or command, and is fair to invocations.
var route = &schedulerpb.ActionRouterConfiguration{Kind: &schedulerpb.ActionRouterConfiguration_Simple{
	Simple: &schedulerpb.SimpleActionRouterConfiguration{
		PlatformKeyExtractor: &schedulerpb.PlatformKeyExtractorConfiguration{
			Kind: &schedulerpb.PlatformKeyExtractorConfiguration_ActionAndCommand{ActionAndCommand: &emptypb.Empty{}},
		},
		InvocationKeyExtractors: []*schedulerpb.InvocationKeyExtractorConfiguration{{
			Kind: &schedulerpb.InvocationKeyExtractorConfiguration_ToolInvocationId{ToolInvocationId: &emptypb.Empty{}},
		}},
		InitialSizeClassAnalyzer: &schedulerpb.InitialSizeClassAnalyzerConfiguration{
			DefaultExecutionTimeout: durationpb.New(30 * time.Minute),
			MaximumExecutionTimeout: durationpb.New(time.Hour),
		},
	},
}}
