// SPDX-License-Identifier: Apache-2.0

// Command bbstorage is Buildbarn's bb_storage configured by flags: persistent blobs in a file that serves as a block
// device, or sharding among other storages, and an action cache with completeness checking. It only configures
// Buildbarn's packages.
package main

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"time"

	remoteexecution "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/buildbarn/bb-storage/pkg/blobstore/configuration"
	"github.com/buildbarn/bb-storage/pkg/blobstore/grpcservers"
	"github.com/buildbarn/bb-storage/pkg/capabilities"
	bb_grpc "github.com/buildbarn/bb-storage/pkg/grpc"
	"github.com/buildbarn/bb-storage/pkg/program"
	"github.com/buildbarn/bb-storage/pkg/proto/auth"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/blobstore"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/blockdevice"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/digest"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/eviction"
	grpcpb "github.com/buildbarn/bb-storage/pkg/proto/configuration/grpc"
	"google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// maxMessage is the largest message in bytes, as accepted by gRPC clients.
	maxMessage = 4 << 20
	// readChunk is the chunk size of ByteStream reads in bytes, as in bb_storage.
	readChunk = 1 << 16
	// resultsShare is the divisor of the size for action results.
	resultsShare = 64
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8982", "address and port")
	dir := flag.String("dir", "", "existing directory for the storage")
	size := flag.Int64("size", 10<<30, "size of the blob storage in bytes")
	complete := flag.Bool("complete", true, "serve a result only if its blobs are present")
	shards := flag.String("shards", "",
		"comma-separated addresses of storages that hold the blobs and results instead; an empty one is drained")
	flag.Parse()
	program.RunMain(func(_ context.Context, siblings, dependencies program.Group) error {
		if *dir == "" || flag.NArg() > 0 {
			return errors.New("usage: bbstorage -dir DIR [-listen HOST:PORT] [-size BYTES] [-shards HOST:PORT,...]")
		}
		if *shards != "" {
			return serve(*listen, sharded(strings.Split(*shards, ",")), *complete, siblings, dependencies)
		}
		backends, err := locals(*dir, *size)
		if err != nil {
			return err
		}
		return serve(*listen, backends, *complete, siblings, dependencies)
	})
}

// locals returns the configuration of storages in dir.
func locals(dir string, size int64) (*blobstore.BlobstoreConfiguration, error) {
	blobs, err := local(filepath.Join(dir, "cas"), size, 3)
	if err != nil {
		return nil, err
	}
	results, err := local(filepath.Join(dir, "ac"), size/resultsShare, 1)
	return &blobstore.BlobstoreConfiguration{ContentAddressableStorage: blobs, ActionCache: results}, err
}

// sharded returns the configuration of a storage that is divided equally among addresses. What belongs to an empty one
// goes to the others.
func sharded(addresses []string) *blobstore.BlobstoreConfiguration {
	var shards []*blobstore.ShardingBlobAccessConfiguration_Shard
	for _, a := range addresses {
		shard := &blobstore.ShardingBlobAccessConfiguration_Shard{Weight: 1}
		if a != "" {
			shard.Backend = &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_Grpc{
				Grpc: &grpcpb.ClientConfiguration{Address: a},
			}}
		}
		shards = append(shards, shard)
	}
	all := &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_Sharding{
		Sharding: &blobstore.ShardingBlobAccessConfiguration{HashInitialization: 11946695773637837490, Shards: shards},
	}}
	return &blobstore.BlobstoreConfiguration{ContentAddressableStorage: all, ActionCache: all}
}

// serve starts the servers; the groups run them.
func serve(listen string, c *blobstore.BlobstoreConfiguration, complete bool, siblings, dependencies program.Group) error {
	clients := bb_grpc.NewBaseClientFactory(bb_grpc.BaseClientDialer, nil, nil)
	cas, err := configuration.NewBlobAccessFromConfiguration(dependencies, c.ContentAddressableStorage,
		configuration.NewCASBlobAccessCreator(clients, maxMessage))
	if err != nil {
		return err
	}
	results := c.ActionCache
	if complete {
		results = &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_CompletenessChecking{
			CompletenessChecking: &blobstore.CompletenessCheckingBlobAccessConfiguration{
				Backend: results, MaximumTotalTreeSizeBytes: 64 << 20,
			},
		}}
	}
	ac, err := configuration.NewBlobAccessFromConfiguration(dependencies, results, configuration.NewACBlobAccessCreator(&cas, clients, maxMessage))
	if err != nil {
		return err
	}
	return bb_grpc.NewServersFromConfigurationAndServe(
		[]*grpcpb.ServerConfiguration{{
			ListenAddresses: []string{listen},
			AuthenticationPolicy: &grpcpb.AuthenticationPolicy{
				Policy: &grpcpb.AuthenticationPolicy_Allow{Allow: &auth.AuthenticationMetadata{}},
			},
			MaximumReceivedMessageSizeBytes: maxMessage,
		}},
		func(registrar grpc.ServiceRegistrar) {
			s := registrar.(*grpc.Server) // required by the generated code
			remoteexecution.RegisterContentAddressableStorageServer(s, grpcservers.NewContentAddressableStorageServer(cas.BlobAccess, maxMessage))
			bytestream.RegisterByteStreamServer(s, grpcservers.NewByteStreamServer(cas.BlobAccess, readChunk))
			remoteexecution.RegisterActionCacheServer(s, grpcservers.NewActionCacheServer(ac.BlobAccess, maxMessage))
			remoteexecution.RegisterCapabilitiesServer(s, capabilities.NewServer(
				capabilities.NewMergingProvider([]capabilities.Provider{cas.BlobAccess, ac.BlobAccess})))
		},
		siblings)
}

// local returns the configuration of a storage in dir, with the proportions of Buildbarn's examples.
func local(dir string, size int64, newBlocks int32) (*blobstore.BlobAccessConfiguration, error) {
	state := filepath.Join(dir, "persistent_state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, err
	}
	file := func(name string, size int64) *blockdevice.Configuration {
		return &blockdevice.Configuration{Source: &blockdevice.Configuration_File{
			File: &blockdevice.FileConfiguration{Path: filepath.Join(dir, name), SizeBytes: size},
		}}
	}
	return &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_Local{
		Local: &blobstore.LocalBlobAccessConfiguration{
			KeyLocationMapBackend: &blobstore.LocalBlobAccessConfiguration_KeyLocationMapOnBlockDevice{
				KeyLocationMapOnBlockDevice: file("key_location_map", max(size/64, 1<<20)),
			},
			KeyLocationMapMaximumGetAttempts: 16,
			KeyLocationMapMaximumPutAttempts: 64,
			OldBlocks:                        8,
			CurrentBlocks:                    24,
			NewBlocks:                        newBlocks,
			BlocksBackend: &blobstore.LocalBlobAccessConfiguration_BlocksOnBlockDevice_{
				BlocksOnBlockDevice: &blobstore.LocalBlobAccessConfiguration_BlocksOnBlockDevice{
					Source:      file("blocks", size),
					SpareBlocks: 3,
					DataIntegrityValidationCache: &digest.ExistenceCacheConfiguration{
						CacheSize:              100_000,
						CacheDuration:          durationpb.New(4 * time.Hour),
						CacheReplacementPolicy: eviction.CacheReplacementPolicy_LEAST_RECENTLY_USED,
					},
				},
			},
			Persistent: &blobstore.LocalBlobAccessConfiguration_Persistent{
				StateDirectoryPath:   state,
				MinimumEpochInterval: durationpb.New(5 * time.Minute),
			},
		},
	}}, nil
}
