// SPDX-License-Identifier: Apache-2.0

package execserver_test

import (
	"context"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execserver"
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/queue"
)

// TestPullsReachClients: an action is QUEUED while its container image is pulled. Its stream shows the pull as it
// progresses, GetOperation and ListOperations show it too, and nothing shows it afterwards.
func TestPullsReachClients(t *testing.T) {
	pulled := make(chan struct{})
	read := make(chan int64, 1)
	s := serve(t, succeed, func(_ *queue.Config, c *execserver.Config) {
		c.KeepaliveInterval = time.Hour // only pulls are repeated sooner
		admit := c.Admit
		c.Admit = func(ctx context.Context, task *worker.Task) (worker.Admission, error) {
			a, err := admit(ctx, task)
			a.Pull = func(ctx context.Context) error {
				defer pulls.Begin(ctx, func() *cloisterpb.ImagePull {
					n := <-read
					read <- n + 1
					return &cloisterpb.ImagePull{Pinned: "example.com/tools@sha256:1f", ReadBytes: n, TotalBytes: 1 << 40}
				})()
				select {
				case <-pulled:
				case <-ctx.Done(): // the test has failed
				}
				return nil
			}
			return a, err
		}
	})
	read <- 1
	st := s.execute(t.Context(), t, s.action(t, "x"), nil)
	var last int64
	var name string
	for shown := 0; shown < 3; {
		m := reach(t, st, repb.ExecutionStage_QUEUED)
		pull := pullOf(t, m)
		if pull == nil && shown == 0 {
			continue // it has not begun
		}
		shown++
		expect.That(t, pull.GetPinned() == "example.com/tools@sha256:1f" && pull.ReadBytes > last, "got %v after %d bytes, want progress", pull, last)
		name, last = m.Name, pull.GetReadBytes()
	}
	got := must.Get(s.ops.GetOperation(t.Context(), &longrunningpb.GetOperationRequest{Name: name}))(t)
	expect.That(t, pullOf(t, got) != nil, "GetOperation shows no pull")
	listed, _ := s.list(t, &longrunningpb.ListOperationsRequest{})
	must.Be(t, len(listed) == 1 && pullOf(t, listed[0]) != nil, "ListOperations: got %v, want a pull", listed)
	close(pulled)
	for {
		m := recv(t, st)
		if stageOf(t, m) != repb.ExecutionStage_QUEUED {
			expect.That(t, pullOf(t, m) == nil, "%s shows a pull", stageOf(t, m))
		}
		if m.Done {
			break
		}
	}
}

// pullOf returns the pull in the metadata of m, or nil.
func pullOf(t *testing.T, m *longrunningpb.Operation) *cloisterpb.ImagePull {
	t.Helper()
	var md repb.ExecuteOperationMetadata
	must.Succeed(t, m.Metadata.UnmarshalTo(&md))
	for _, aux := range md.PartialExecutionMetadata.GetAuxiliaryMetadata() {
		var pull cloisterpb.ImagePull
		if aux.UnmarshalTo(&pull) == nil {
			return &pull
		}
	}
	return nil
}
