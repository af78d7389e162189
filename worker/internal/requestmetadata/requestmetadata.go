// SPDX-License-Identifier: Apache-2.0

// Package requestmetadata reads the RequestMetadata that clients send with calls.
package requestmetadata

import (
	"context"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

const (
	// header is the header with a client's request metadata.
	header = "build.bazel.remote.execution.v2.requestmetadata-bin"
	// maxHeader bounds the bytes of the header.
	maxHeader = 64 << 10
)

// Of returns the unverified request metadata of a call, which is empty if the header is absent or malformed (rule 128).
func Of(ctx context.Context) *repb.RequestMetadata {
	m := &repb.RequestMetadata{}
	values := metadata.ValueFromIncomingContext(ctx, header)
	if len(values) == 0 || len(values[0]) > maxHeader || proto.Unmarshal([]byte(values[0]), m) != nil {
		return &repb.RequestMetadata{}
	}
	return m
}
