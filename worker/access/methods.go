// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// A demand is the right that a method needs.
type demand struct {
	// rights are alternatives, one of which is needed; 0 needs none, and no credential.
	rights permission
	// of returns the instances that a message may refer to; the right is needed in each. If of or its result is nil, the
	// right in any instance suffices.
	of func(m any) ([]string, error)
}

// A table has the methods of one port by full name.
type table map[string]demand

// methods is the table of the clients' port.
var methods = table{
	// It reports what the caller may do in the instance, possibly nothing. Clients ask before they know their instance.
	repb.Capabilities_GetCapabilities_FullMethodName: {rightRead | rightWrite | rightCache | rightExecute | rightOperate, nil},

	// Uploads ask for missing blobs, too.
	repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName:     {rightRead | rightWrite, named},
	repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName:     {rightWrite, named},
	repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName:       {rightRead, named},
	repb.ContentAddressableStorage_GetTree_FullMethodName:              {rightRead, named},
	repb.ContentAddressableStorage_SplitBlob_FullMethodName:            {rightRead, named},
	repb.ContentAddressableStorage_SpliceBlob_FullMethodName:           {rightWrite, named},
	repb.ContentAddressableStorage_GetChunkMapping_FullMethodName:      {rightRead, named},
	repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName: {rightWrite, named},

	"/google.bytestream.ByteStream/Read":             {rightRead, resource},
	"/google.bytestream.ByteStream/Write":            {rightWrite, resource},
	"/google.bytestream.ByteStream/QueryWriteStatus": {rightWrite, resource},

	repb.ActionCache_GetActionResult_FullMethodName:    {rightRead, named},
	repb.ActionCache_UpdateActionResult_FullMethodName: {rightCache, named},

	// An asset is an entry of the action cache.
	assetpb.Fetch_FetchBlob_FullMethodName:      {rightRead, named},
	assetpb.Fetch_FetchDirectory_FullMethodName: {rightRead, named},
	assetpb.Push_PushBlob_FullMethodName:        {rightCache, named},
	assetpb.Push_PushDirectory_FullMethodName:   {rightCache, named},

	repb.Execution_Execute_FullMethodName:       {rightExecute, named},
	repb.Execution_WaitExecution_FullMethodName: {rightExecute, operation},

	longrunningpb.Operations_ListOperations_FullMethodName:  {rightExecute, operations},
	longrunningpb.Operations_GetOperation_FullMethodName:    {rightExecute, operation},
	longrunningpb.Operations_DeleteOperation_FullMethodName: {rightExecute, operation},
	longrunningpb.Operations_CancelOperation_FullMethodName: {rightExecute, operation},
	longrunningpb.Operations_WaitOperation_FullMethodName:   {rightExecute, operation},

	logpb.LogStreamService_CreateLogStream_FullMethodName: {rightWrite, parent},

	// The history reveals digests that can be read.
	cloisterpb.History_List_FullMethodName: {rightRead, history},
	// So do the events of builds. Publishing them is an upload.
	cloisterpb.Builds_Read_FullMethodName:                                     {rightRead, history},
	cloisterpb.Builds_List_FullMethodName:                                     {rightRead, history},
	"/google.devtools.build.v1.PublishBuildEvent/PublishBuildToolEventStream": {rightWrite, project},
	"/google.devtools.build.v1.PublishBuildEvent/PublishLifecycleEvent":       {rightWrite, project},
	// So does the index of the store.
	cloisterpb.BlobIndex_Find_FullMethodName: {rightRead, named},

	// The status of an instance depends on the caller. Draining affects all instances.
	cloisterpb.Fleet_Status_FullMethodName:  {rightExecute | rightOperate, nil},
	cloisterpb.Fleet_Drain_FullMethodName:   {rightOperate, nil},
	cloisterpb.Fleet_Undrain_FullMethodName: {rightOperate, nil},

	// Operators act on the store and the images of all instances, and the audit log names all instances.
	cloisterpb.Store_Stat_FullMethodName:    {rightOperate, nil},
	cloisterpb.Store_Collect_FullMethodName: {rightOperate, nil},
	cloisterpb.Store_Verify_FullMethodName:  {rightOperate, nil},
	cloisterpb.Store_Forget_FullMethodName:  {rightOperate, nil},
	cloisterpb.AuditLog_Read_FullMethodName: {rightOperate, nil},
	cloisterpb.Images_List_FullMethodName:   {rightOperate, nil},
	cloisterpb.Images_Pull_FullMethodName:   {rightOperate, nil},
	cloisterpb.Images_Load_FullMethodName:   {rightOperate, nil},
	cloisterpb.Images_Remove_FullMethodName: {rightOperate, nil},

	// Load balancers have no credentials.
	healthpb.Health_Check_FullMethodName: {},
	healthpb.Health_Watch_FullMethodName: {},
	healthpb.Health_List_FullMethodName:  {},

	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      {rightRead, nil},
	"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {rightRead, nil},
}

// workers is the table of the workers' port: store and queue. A worker reads inputs and produces results, so one right
// per instance covers everything.
var workers = table{
	repb.Capabilities_GetCapabilities_FullMethodName: {rightWork, nil},

	repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName:     {rightWork, named},
	repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName:     {rightWork, named},
	repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName:       {rightWork, named},
	repb.ContentAddressableStorage_GetTree_FullMethodName:              {rightWork, named},
	repb.ContentAddressableStorage_SplitBlob_FullMethodName:            {rightWork, named},
	repb.ContentAddressableStorage_SpliceBlob_FullMethodName:           {rightWork, named},
	repb.ContentAddressableStorage_GetChunkMapping_FullMethodName:      {rightWork, named},
	repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName: {rightWork, named},

	"/google.bytestream.ByteStream/Read":             {rightWork, resource},
	"/google.bytestream.ByteStream/Write":            {rightWork, resource},
	"/google.bytestream.ByteStream/QueryWriteStatus": {rightWork, resource},

	repb.ActionCache_GetActionResult_FullMethodName:    {rightWork, named},
	repb.ActionCache_UpdateActionResult_FullMethodName: {rightWork, named},

	remoteworkerpb.OperationQueue_Synchronize_FullMethodName: {rightWork, prefixed},

	healthpb.Health_Check_FullMethodName: {},
	healthpb.Health_Watch_FullMethodName: {},
	healthpb.Health_List_FullMethodName:  {},
}

// waits has the methods whose calls wait for minutes. Such a call ends when its caller loses the right.
var waits = map[string]bool{remoteworkerpb.OperationQueue_Synchronize_FullMethodName: true}

// Check returns an error that names the methods of a server for clients that lack a table entry.
func Check(services map[string]grpc.ServiceInfo) error { return methods.check("methods", services) }

// CheckWorkers is Check for the workers' port.
func CheckWorkers(services map[string]grpc.ServiceInfo) error {
	return workers.check("workers", services)
}

func (t table) check(name string, services map[string]grpc.ServiceInfo) error {
	var unknown []string
	for service, info := range services {
		for _, m := range info.Methods {
			if full := "/" + service + "/" + m.Name; !t.known(full) {
				unknown = append(unknown, full)
			}
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	slices.Sort(unknown)
	return fmt.Errorf("no right is defined for %s: add it to %s in package access", strings.Join(unknown, ", "), name)
}

func (t table) known(method string) bool { _, ok := t[method]; return ok }

// Instance returns the instance that the first message of a call to the clients' port names. It returns false if the
// message is malformed, or refers to no instance or to all.
func Instance(method string, message any) (name string, ok bool) {
	d := methods[method]
	if d.of == nil {
		return "", false
	}
	instances, err := d.of(message)
	if err != nil || len(instances) != 1 {
		return "", false
	}
	return instances[0], true
}

// errMessage means that a message has the wrong type for its method.
var errMessage = errors.New("the message does not name an instance")

// named is for messages with an instance name.
func named(m any) ([]string, error) {
	if m, ok := m.(interface{ GetInstanceName() string }); ok {
		return []string{m.GetInstanceName()}, nil
	}
	return nil, errMessage
}

// history is for requests for the history or the builds of one instance, or of those in which the caller has the right.
func history(m any) ([]string, error) {
	if m, ok := m.(interface{ GetAllInstances() bool }); ok && m.GetAllInstances() {
		return nil, nil
	}
	return named(m)
}

// prefixed is for messages with an instance name prefix, which refer to that instance and all below it. No instance has
// the second of the returned names; only a right for PREFIX/* matches it.
func prefixed(m any) ([]string, error) {
	if m, ok := m.(interface{ GetInstanceNamePrefix() string }); ok {
		return []string{m.GetInstanceNamePrefix(), m.GetInstanceNamePrefix() + "/"}, nil
	}
	return nil, errMessage
}

// project is for build events, whose project is an instance.
func project(m any) ([]string, error) {
	if m, ok := m.(interface{ GetProjectId() string }); ok {
		return []string{m.GetProjectId()}, nil
	}
	return nil, errMessage
}

// parent is for messages whose parent is an instance.
func parent(m any) ([]string, error) {
	if m, ok := m.(interface{ GetParent() string }); ok {
		return []string{strings.Trim(m.GetParent(), "/")}, nil
	}
	return nil, errMessage
}

// operation is for messages with an operation name, [INSTANCE/]operations/ID. Other names contain no instance; knowing
// one is sufficient, since they cannot be guessed.
func operation(m any) ([]string, error) {
	o, ok := m.(interface{ GetName() string })
	if !ok {
		return nil, errMessage
	}
	segments := strings.Split(o.GetName(), "/")
	if i := slices.Index(segments, "operations"); i >= 0 {
		return []string{strings.Join(segments[:i], "/")}, nil
	}
	return nil, nil
}

// operations is for messages with the name of an operation collection, INSTANCE or [INSTANCE/]operations, or - for the
// operations of all instances in which the caller has the right (AIP-159).
func operations(m any) ([]string, error) {
	o, ok := m.(interface{ GetName() string })
	if !ok {
		return nil, errMessage
	}
	name := strings.Trim(o.GetName(), "/")
	if name == "-" {
		return nil, nil
	}
	if i := slices.Index(strings.Split(name, "/"), "operations"); i >= 0 {
		return operation(m)
	}
	return []string{name}, nil
}

// resource is for messages with a ByteStream resource name. The first reserved word ends the instance name, since no
// instance name contains one.
func resource(m any) ([]string, error) {
	r, ok := m.(interface{ GetResourceName() string })
	if !ok {
		return nil, errMessage
	}
	segments, reserved := strings.Split(r.GetResourceName(), "/"), cas.Reserved()
	i := slices.IndexFunc(segments, func(s string) bool { return slices.Contains(reserved, s) })
	if i < 0 {
		return nil, fmt.Errorf("resource name %+.256q has no segment blobs, compressed-blobs, uploads or logstreams",
			r.GetResourceName())
	}
	return []string{strings.Join(segments[:i], "/")}, nil
}
