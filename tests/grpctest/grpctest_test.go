// SPDX-License-Identifier: Apache-2.0

package grpctest_test

import (
	"testing"

	"github.com/cloister-build/cloister/tests/grpctest"
	"google.golang.org/grpc"
)

// TestListenWithAStoppedServer: a test may end before its server begins to serve.
func TestListenWithAStoppedServer(t *testing.T) {
	s := grpc.NewServer()
	s.Stop()
	grpctest.Listen(t, s)
}
