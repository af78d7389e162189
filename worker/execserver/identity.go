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
	// requestMetadata is the header in which a client says what it builds.
	requestMetadata = "build.bazel.remote.execution.v2.requestmetadata-bin"
	// maxHeader bounds, in bytes, what is read of the header.
	maxHeader = 64 << 10
)

// identity returns what the client says of itself. A header that is absent or malformed says nothing
// (rule 128); nobody vouches for one that is not.
func identity(ctx context.Context) *repb.RequestMetadata {
	m := &repb.RequestMetadata{}
	values := metadata.ValueFromIncomingContext(ctx, requestMetadata)
	if len(values) == 0 || len(values[0]) > maxHeader || proto.Unmarshal([]byte(values[0]), m) != nil {
		return &repb.RequestMetadata{}
	}
	return m
}

// trace returns the headers by which the client's call is a part of a trace.
func trace(ctx context.Context) map[string]string {
	headers := map[string]string{}
	for _, name := range worker.TraceHeaders {
		// Headers of one name are one header, with commas between.
		if values := metadata.ValueFromIncomingContext(ctx, name); len(values) > 0 {
			headers[name] = strings.Join(values, ",")
		}
	}
	return worker.ParseTrace(headers)
}
