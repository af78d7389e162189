// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"context"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

const (
	// metadataHeader is the header with a client's request metadata.
	metadataHeader = "build.bazel.remote.execution.v2.requestmetadata-bin"
	// maxHeader bounds the bytes of the header.
	maxHeader = 64 << 10
)

// RequestMetadata returns the unverified request metadata of a client, which is empty if the header is absent or
// malformed (rule 128).
func RequestMetadata(ctx context.Context) *repb.RequestMetadata {
	m := &repb.RequestMetadata{}
	values := metadata.ValueFromIncomingContext(ctx, metadataHeader)
	if len(values) == 0 || len(values[0]) > maxHeader || proto.Unmarshal([]byte(values[0]), m) != nil {
		return &repb.RequestMetadata{}
	}
	return m
}

// trace returns the trace headers of a call.
func trace(ctx context.Context) map[string]string {
	return worker.ParseTrace(func(name string) string {
		return strings.Join(metadata.ValueFromIncomingContext(ctx, name), ",") // of repeated headers
	})
}
