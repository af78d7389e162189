// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/ca"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// TestActionsHaveTheRightsOfTheirClient: serve checks and counts the calls that an action makes like those of its client.
func TestActionsHaveTheRightsOfTheirClient(t *testing.T) {
	confined(t)
	a := ca.New(t, t.TempDir())
	rules := a.Write("policy.yaml", []byte("version: 1\nprofiles: {build: {remote_apis: {allow: true}}}\n"))
	_, guest := (&client{TB: t}).secured(a, []string{"--policy", rules, "--caller-limit", "executions=1"},
		fmt.Sprintf("  - {name: builder, token_sha256: %x, rights: [read, write, execute]}", sha256.Sum256([]byte("builder-token"))))
	c := guest("", "builder-token")
	step := func(method string, m proto.Message) string {
		encoded, _ := encoded(t, m)
		return "call apis.sock " + method + " " + hex.EncodeToString(encoded)
	}
	inner := c.prepare(job{steps: []string{"say inner"}})
	out, _ := c.succeed(job{
		steps: []string{
			step(repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName, &repb.FindMissingBlobsRequest{InstanceName: "main"}),
			step(repb.ActionCache_UpdateActionResult_FullMethodName, &repb.UpdateActionResultRequest{
				InstanceName: "main", ActionDigest: inner, ActionResult: &repb.ActionResult{},
			}),
			step(repb.Execution_Execute_FullMethodName, &repb.ExecuteRequest{InstanceName: "main", ActionDigest: inner}),
		},
		command: &repb.Command{Platform: c.platform(&repb.Platform_Property{Name: "remoteApisSocketPath", Value: "apis.sock"})},
	})
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for i, want := range []string{
		"0 ", fmt.Sprintf("%d caller builder does not have the right cache", codes.PermissionDenied),
		fmt.Sprintf("%d too many executions", codes.ResourceExhausted),
	} {
		expect.That(t, i < len(lines) && strings.HasPrefix(lines[i]+" ", want), "call %d: got %q, want a line that begins with %q", i, lines, want)
	}
}
