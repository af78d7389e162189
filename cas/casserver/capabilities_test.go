// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

func (c *client) capabilities(t *testing.T) *repb.ServerCapabilities {
	t.Helper()
	return must.Get(c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{}))(t)
}

func TestRule128_RequestMetadataMayBeAnything(t *testing.T) {
	c := serve(t, casserver.Config{})
	d := c.put(t, "data")
	for _, value := range []string{"", "no message \xff\xff", "\x0a\x02xy"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", value)
		for _, call := range c.calls() {
			if code := codes.OK; call.name != "GetTree" && call.name != "GetActionResult" {
				wantCode(t, call.do(ctx, target{digest: d.Proto()}), code)
			}
		}
	}
}

// Rights do not enable what the server does not support. Package access tests what the rights of a caller report.
func TestRightsEnableOnlyWhatIsSupported(t *testing.T) {
	all := func(context.Context, string) (execute, update bool) { return true, true }
	r := serve(t, casserver.Config{Execution: &repb.ExecutionCapabilities{}, Rights: all}).capabilities(t)
	expect.That(t, !r.ExecutionCapabilities.ExecEnabled, "a right enabled something unsupported: %v", r)
}
