// SPDX-License-Identifier: Apache-2.0

// Package wiring makes the parts of their configuration that Buildbarn's servers have in common, from flags
// instead of from files.
package wiring

import (
	"fmt"
	"slices"
	"strings"

	remoteexecution "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/buildbarn/bb-storage/pkg/proto/auth"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/blobstore"
	"github.com/buildbarn/bb-storage/pkg/proto/configuration/global"
	grpcpb "github.com/buildbarn/bb-storage/pkg/proto/configuration/grpc"
	httppb "github.com/buildbarn/bb-storage/pkg/proto/configuration/http"
	"google.golang.org/protobuf/types/known/emptypb"
)

// MaxMessage is the largest message, in bytes. What gRPC clients accept is 4 MiB.
const MaxMessage = 4 << 20

// Server is the configuration of a gRPC server at HOST:PORT, for everybody.
func Server(listen string) []*grpcpb.ServerConfiguration {
	return []*grpcpb.ServerConfiguration{{
		ListenAddresses: []string{listen},
		AuthenticationPolicy: &grpcpb.AuthenticationPolicy{
			Policy: &grpcpb.AuthenticationPolicy_Allow{Allow: &auth.AuthenticationMetadata{}},
		},
		MaximumReceivedMessageSizeBytes: MaxMessage,
	}}
}

// Global is the configuration of what is said about a process: at /metrics and /-/healthy of HOST:PORT, for
// everybody; nothing is said if that is empty. Calls take up the traces of those for which they are made, and nobody is
// told of traces.
func Global(diagnostics string) *global.Configuration {
	c := &global.Configuration{Tracing: &global.TracingConfiguration{Sampler: &global.TracingConfiguration_Sampler{
		Policy: &global.TracingConfiguration_Sampler_Never{Never: &emptypb.Empty{}},
	}}}
	if diagnostics == "" {
		return c
	}
	c.DiagnosticsHttpServer = &global.DiagnosticsHTTPServerConfiguration{
		HttpServers: []*httppb.ServerConfiguration{{
			ListenAddresses: []string{diagnostics},
			AuthenticationPolicy: &httppb.AuthenticationPolicy{
				Policy: &httppb.AuthenticationPolicy_Allow{Allow: &auth.AuthenticationMetadata{}},
			},
		}},
		EnablePrometheus: true,
	}
	return c
}

// Store is the configuration of blobs and results that are at another server, HOST:PORT.
func Store(address string) *blobstore.BlobstoreConfiguration {
	at := &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_Grpc{
		Grpc: &grpcpb.ClientConfiguration{Address: address},
	}}
	return &blobstore.BlobstoreConfiguration{ContentAddressableStorage: at, ActionCache: at}
}

// A Pairs is a flag that may be given several times, each a KEY=VALUE.
type Pairs []string

// String implements flag.Value.
func (p *Pairs) String() string { return strings.Join(*p, ",") }

// Set implements flag.Value.
func (p *Pairs) Set(pair string) error {
	if !strings.Contains(pair, "=") {
		return fmt.Errorf("%q is not KEY=VALUE", pair)
	}
	*p = append(*p, pair)
	return nil
}

// Map returns the pairs by key.
func (p Pairs) Map() map[string]string {
	m := map[string]string{}
	for _, pair := range p {
		k, v, _ := strings.Cut(pair, "=")
		m[k] = v
	}
	return m
}

// Platform returns the pairs as properties, sorted as the API has it.
func (p Pairs) Platform() *remoteexecution.Platform {
	platform := &remoteexecution.Platform{}
	for _, pair := range p {
		k, v, _ := strings.Cut(pair, "=")
		platform.Properties = append(platform.Properties, &remoteexecution.Platform_Property{Name: k, Value: v})
	}
	slices.SortFunc(platform.Properties, func(a, b *remoteexecution.Platform_Property) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.Value, b.Value)
	})
	return platform
}
