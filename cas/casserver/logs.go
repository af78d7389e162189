// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"slices"
	"strings"

	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/protobuf/proto"
)

// Logs serve the names of ByteStream that are of log streams and not of blobs: [INSTANCE/]logstreams/ID for
// reading, with a further /TOKEN for writing. They return statuses, and are safe for concurrent use.
type Logs interface {
	Read(*bspb.ReadRequest, bspb.ByteStream_ReadServer) error
	// Write is given the first message, which is its own.
	Write(first *bspb.WriteRequest, rest bspb.ByteStream_WriteServer) error
	QueryWriteStatus(context.Context, *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error)
}

// ofLog reports whether a resource name is for c.Logs. An instance may be called logstreams; that a name holds a
// word which no instance may have tells it from a stream's.
func (c *Config) ofLog(name string) bool {
	if c.Logs == nil || !strings.Contains(name, "logstreams/") {
		return false // nearly all names
	}
	segs := strings.Split(name, "/")
	return slices.Contains(segs, "logstreams") &&
		!slices.ContainsFunc(segs, func(s string) bool { return s == "blobs" || s == "compressed-blobs" || s == "uploads" })
}

// writeLog passes on a write of which the first message has been received.
func (s *byteStream) writeLog(m *incoming, stream bspb.ByteStream_WriteServer) error {
	first := proto.CloneOf(&m.WriteRequest)
	m.release() // a client that takes its time holds no buffer
	return s.Logs.Write(first, stream)
}
