// SPDX-License-Identifier: Apache-2.0

// Command bbworker is Buildbarn's bb_worker configured by flags: each thread takes actions from a scheduler, stages the
// input root in a directory, runs the command with a runner, and stores its outputs. It only configures Buildbarn's
// packages.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"net/url"
	"os"
	"strconv"
	"sync/atomic"

	re_blobstore "github.com/buildbarn/bb-remote-execution/pkg/blobstore"
	"github.com/buildbarn/bb-remote-execution/pkg/builder"
	"github.com/buildbarn/bb-remote-execution/pkg/cas"
	"github.com/buildbarn/bb-remote-execution/pkg/cleaner"
	re_filesystem "github.com/buildbarn/bb-remote-execution/pkg/filesystem"
	caspb "github.com/buildbarn/bb-remote-execution/pkg/proto/configuration/cas"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/remoteworker"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/runner"
	"github.com/buildbarn/bb-storage/pkg/blobstore"
	"github.com/buildbarn/bb-storage/pkg/blobstore/configuration"
	"github.com/buildbarn/bb-storage/pkg/clock"
	"github.com/buildbarn/bb-storage/pkg/digest"
	"github.com/buildbarn/bb-storage/pkg/eviction"
	"github.com/buildbarn/bb-storage/pkg/filesystem"
	"github.com/buildbarn/bb-storage/pkg/global"
	"github.com/buildbarn/bb-storage/pkg/program"
	evictionpb "github.com/buildbarn/bb-storage/pkg/proto/configuration/eviction"
	grpcpb "github.com/buildbarn/bb-storage/pkg/proto/configuration/grpc"
	"github.com/cloister-build/cloister/tests/interop/peers/bbremote/wiring"
	"go.opentelemetry.io/otel"
	"golang.org/x/sync/semaphore"
)

const (
	// uploads is the number of concurrent uploads.
	uploads = 11
	// uploadBatch is the number of outputs held open until they are stored, as in bb_worker.
	uploadBatch = 100
	// cachedFiles and cachedBytes limit the cached input files.
	cachedFiles = 10_000
	cachedBytes = 1 << 30
)

// A config holds the values of the flags.
type config struct {
	listen, scheduler, store, runner, build, cache string
	instance                                       string
	platform, id, env                              wiring.Pairs
	threads, sizeClass                             uint
}

func main() {
	var c config
	flag.StringVar(&c.listen, "listen", "", "address and port of /metrics and /-/healthy; empty: none")
	flag.StringVar(&c.scheduler, "scheduler", "", "address and port of the scheduler")
	flag.StringVar(&c.store, "store", "", "address and port of the server with blobs and results")
	flag.StringVar(&c.runner, "runner", "", "address of the runner, unix:PATH or HOST:PORT")
	flag.StringVar(&c.build, "build", "", "existing directory for actions, shared with the runner; it is emptied")
	flag.StringVar(&c.cache, "cache", "", "directory on the same file system for input files; it is created or emptied")
	flag.StringVar(&c.instance, "instance", "", "instance name prefix")
	flag.Var(&c.platform, "property", "platform property NAME=VALUE")
	flag.Var(&c.id, "id", "part of the worker's identity, KEY=VALUE")
	flag.Var(&c.env, "env", "default environment variable NAME=VALUE of commands")
	flag.UintVar(&c.threads, "threads", 1, "number of concurrent actions")
	flag.UintVar(&c.sizeClass, "size-class", 0, "size class")
	flag.Parse()
	program.RunMain(func(_ context.Context, siblings, dependencies program.Group) error {
		if c.scheduler == "" || c.store == "" || c.runner == "" || c.build == "" || c.cache == "" || c.threads == 0 || flag.NArg() > 0 {
			return errors.New("usage: bbworker -scheduler HOST:PORT -store HOST:PORT -runner ADDRESS -build DIR -cache DIR [flags]; -h lists them")
		}
		return c.run(siblings, dependencies)
	})
}

// run starts the threads; the groups run them.
func (c *config) run(siblings, dependencies program.Group) error {
	lifecycle, clients, err := global.ApplyConfiguration(wiring.Global(c.listen))
	if err != nil {
		return err
	}
	scheduler, err := clients.NewClientFromConfiguration(&grpcpb.ClientConfiguration{Address: c.scheduler})
	if err != nil {
		return err
	}
	commands, err := clients.NewClientFromConfiguration(&grpcpb.ClientConfiguration{Address: c.runner})
	if err != nil {
		return err
	}
	blobs, results, err := configuration.NewCASAndACBlobAccessFromConfiguration(dependencies, wiring.Store(c.store), clients, wiring.MaxMessage)
	if err != nil {
		return err
	}
	blobs = re_blobstore.NewExistencePreconditionBlobAccess(blobs)
	directories, err := cas.NewCachingDirectoryFetcherFromConfiguration(&caspb.CachingDirectoryFetcherConfiguration{
		MaximumCount: 10_000, MaximumSizeBytes: 16 << 20,
		CacheReplacementPolicy: evictionpb.CacheReplacementPolicy_LEAST_RECENTLY_USED,
	}, cas.NewBlobAccessDirectoryFetcher(blobs, wiring.MaxMessage, 0))
	if err != nil {
		return err
	}
	build, err := filesystem.NewLocalDirectory(c.build)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.cache, 0o700); err != nil {
		return err
	}
	cache, err := filesystem.NewLocalDirectory(c.cache)
	if err != nil {
		return err
	}
	if err := cache.RemoveAllChildren(); err != nil {
		return err
	}
	files := cas.NewHardlinkingFileFetcher(cas.NewBlobAccessFileFetcher(blobs), cache, cachedFiles, cachedBytes,
		eviction.NewLRUSet[string]())
	instance, err := digest.NewInstanceName(c.instance)
	if err != nil {
		return err
	}
	var (
		idle     = cleaner.NewIdleInvoker(cleaner.NewDirectoryCleaner(build, c.build))
		parallel atomic.Uint64
		slots    = semaphore.NewWeighted(uploads)
		browser  = &url.URL{Scheme: "http", Host: "browser.invalid"}
	)
	for i := range c.threads {
		id := c.id.Map()
		if c.threads > 1 {
			id["thread"] = strconv.FormatUint(uint64(i), 10)
		}
		name, err := json.Marshal(id)
		if err != nil {
			return err
		}
		writer, flush := re_blobstore.NewBatchedStoreBlobAccess(blobs, digest.KeyWithoutInstance, uploadBatch, slots)
		writer = blobstore.NewMetricsBlobAccess(writer, clock.SystemClock, "cas", "batched_store")
		executor := builder.NewLocalBuildExecutor(
			writer,
			builder.NewSharedBuildDirectoryCreator(
				builder.NewCleanBuildDirectoryCreator(
					builder.NewRootBuildDirectoryCreator(builder.NewNaiveBuildDirectory(build, directories, files, writer)),
					idle),
				&parallel),
			runner.NewRunnerClient(commands),
			clock.SystemClock, nil, wiring.MaxMessage, c.env.Map())
		executor = builder.NewStorageFlushingBuildExecutor(executor, flush)
		executor = builder.NewTimestampedBuildExecutor(executor, clock.SystemClock, string(name))
		executor = builder.NewMetricsBuildExecutor(builder.NewFilePoolStatsBuildExecutor(executor))
		executor = builder.NewCachingBuildExecutor(executor, blobs, results, browser)
		executor = builder.NewLoggingBuildExecutor(executor, browser)
		executor = builder.NewTracingBuildExecutor(executor, otel.GetTracerProvider())
		builder.LaunchWorkerThread(siblings, builder.NewBuildClient(
			remoteworker.NewOperationQueueClient(scheduler), executor, re_filesystem.EmptyFilePool, clock.SystemClock,
			id, instance, c.platform.Platform(), uint32(c.sizeClass)), string(name))
	}
	lifecycle.MarkReadyAndWait(siblings)
	return nil
}
