// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/protobuf/proto"
)

// Logs serves ByteStream resource names of log streams: [INSTANCE/]logstreams/ID for reading, with /TOKEN appended for
// writing. Its methods return gRPC statuses and are safe for concurrent use.
type Logs interface {
	Read(*bspb.ReadRequest, bspb.ByteStream_ReadServer) error
	// Write gets the first message, which it may retain, and the stream of the rest.
	Write(first *bspb.WriteRequest, rest bspb.ByteStream_WriteServer) error
	QueryWriteStatus(context.Context, *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error)
}

// isLog reports whether a resource name is for c.Logs: its first reserved word is logstreams.
func (c *Config) isLog(name string) bool {
	if c.Logs == nil || !strings.Contains(name, "logstreams/") {
		return false // the usual case, without splitting the name
	}
	for seg := range strings.SplitSeq(name, "/") {
		if slices.Contains(cas.Reserved(), seg) {
			return seg == "logstreams"
		}
	}
	return false
}

// writeLog passes a write with its first message m to s.Logs.
func (s *byteStream) writeLog(m *writeRequest, stream bspb.ByteStream_WriteServer) error {
	first := proto.CloneOf(&m.WriteRequest)
	m.release() // a slow client must not hold a buffer
	return s.Logs.Write(first, stream)
}
