// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"
)

// TestCallsCountAsTheirKind: with a limit of one call of a kind, each of its methods keeps the others out.
func TestCallsCountAsTheirKind(t *testing.T) {
	for kind, methods := range map[string][]string{
		"uploads": {
			"/google.bytestream.ByteStream/Write", "/google.devtools.build.v1.PublishBuildEvent/PublishBuildToolEventStream",
			repb.ContentAddressableStorage_SplitBlob_FullMethodName, repb.ContentAddressableStorage_SpliceBlob_FullMethodName,
			repb.ContentAddressableStorage_GetChunkMapping_FullMethodName,
			repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName,
		},
		"executions": {
			repb.Execution_Execute_FullMethodName, repb.Execution_WaitExecution_FullMethodName,
			longrunningpb.Operations_WaitOperation_FullMethodName,
		},
		"queries": {
			longrunningpb.Operations_ListOperations_FullMethodName, cloisterpb.History_List_FullMethodName,
			cloisterpb.BlobIndex_Find_FullMethodName, cloisterpb.Builds_Read_FullMethodName, cloisterpb.Builds_List_FullMethodName,
			cloisterpb.Fleet_Status_FullMethodName, cloisterpb.AuditLog_Read_FullMethodName,
		},
	} {
		for _, first := range methods {
			s := &server{Config: &Config{}}
			must.Succeed(t, s.CallerLimits.Set(kind+"=1"))
			began := make(chan struct{}, len(methods)+1)
			conn := grpctest.Connect(t, grpc.NewServer(append(s.callers().Options(),
				grpc.UnknownServiceHandler(func(_ any, call grpc.ServerStream) error {
					began <- struct{}{}
					<-call.Context().Done()
					return nil
				}))...))
			call := func(method string) grpc.ClientStream {
				return must.Get(conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method))(t)
			}
			call(first)
			<-began
			for _, second := range methods {
				err := call(second).RecvMsg(&emptypb.Empty{})
				expect.Code(t, err, codes.ResourceExhausted, "%s during %s", second, first)
				expect.Message(t, err, "too many "+kind)
			}
			for _, other := range []string{
				repb.ActionCache_GetActionResult_FullMethodName, repb.ContentAddressableStorage_GetTree_FullMethodName,
			} {
				call(other) // of no further kind
				<-began
			}
		}
	}
}
