// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/quota"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker/access"
)

// callers returns the table that enforces CallerLimits and InstanceLimits.
func (s *server) callers() *quota.Table {
	var name func(context.Context) string
	if a := s.Auth.access(); a != nil {
		name = a.Caller
	}
	return quota.New(quota.Config{Callers: s.CallerLimits, Instances: s.InstanceLimits, Name: name, Instance: access.Instance, Methods: map[string]quota.Kind{
		"/google.bytestream.ByteStream/Write":                                     quota.Uploads,
		repb.ContentAddressableStorage_SplitBlob_FullMethodName:                   quota.Uploads,
		repb.ContentAddressableStorage_SpliceBlob_FullMethodName:                  quota.Uploads,
		repb.ContentAddressableStorage_GetChunkMapping_FullMethodName:             quota.Uploads,
		repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName:        quota.Uploads,
		repb.Execution_Execute_FullMethodName:                                     quota.Executions,
		"/google.devtools.build.v1.PublishBuildEvent/PublishBuildToolEventStream": quota.Uploads,
		repb.Execution_WaitExecution_FullMethodName:                               quota.Executions,
		longrunningpb.Operations_WaitOperation_FullMethodName:                     quota.Executions,
		longrunningpb.Operations_ListOperations_FullMethodName:                    quota.Queries,
		cloisterpb.History_List_FullMethodName:                                    quota.Queries,
		cloisterpb.BlobIndex_Find_FullMethodName:                                  quota.Queries,
		cloisterpb.Builds_Read_FullMethodName:                                     quota.Queries,
		cloisterpb.Builds_List_FullMethodName:                                     quota.Queries,
		// Status holds the queue's mutex while it compares demands with workers.
		cloisterpb.Fleet_Status_FullMethodName:  quota.Queries,
		cloisterpb.AuditLog_Read_FullMethodName: quota.Queries,
	}})
}
