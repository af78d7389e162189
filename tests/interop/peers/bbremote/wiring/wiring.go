// SPDX-License-Identifier: Apache-2.0

// Package wiring builds the common configuration of Buildbarn's servers from flags.
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

// MaxMessage is the largest message in bytes, as accepted by gRPC clients.
const MaxMessage = 4 << 20

// Server returns the configuration of a gRPC server at HOST:PORT without authentication.
func Server(listen string) []*grpcpb.ServerConfiguration {
	return []*grpcpb.ServerConfiguration{{
		ListenAddresses: []string{listen},
		AuthenticationPolicy: &grpcpb.AuthenticationPolicy{
			Policy: &grpcpb.AuthenticationPolicy_Allow{Allow: &auth.AuthenticationMetadata{}},
		},
		MaximumReceivedMessageSizeBytes: MaxMessage,
	}}
}

// Global returns the global configuration, with /metrics and /-/healthy at HOST:PORT unless it is empty. Calls
// propagate traces, which are not exported.
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

// Store returns the configuration of a store at HOST:PORT.
func Store(address string) *blobstore.BlobstoreConfiguration {
	at := &blobstore.BlobAccessConfiguration{Backend: &blobstore.BlobAccessConfiguration_Grpc{
		Grpc: &grpcpb.ClientConfiguration{Address: address},
	}}
	return &blobstore.BlobstoreConfiguration{ContentAddressableStorage: at, ActionCache: at}
}

// Pairs is a repeatable flag KEY=VALUE.
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

// Platform returns the pairs as sorted properties.
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
