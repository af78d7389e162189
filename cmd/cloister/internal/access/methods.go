// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// A demand is what a method needs.
type demand struct {
	// rights are those of which one is needed; 0 is none, and no credential either.
	rights Right
	// of returns the instances that a message may be about, in each of which the right is needed; nil, or a nil result,
	// is one that the message does not say: the right in any instance will do.
	of func(m any) ([]string, error)
}

// A table has all methods that may be called at one port, by their full names.
type table map[string]demand

// methods are those of the clients' port.
var methods = table{
	// They tell what the caller may do in the instance, which may be nothing; clients ask before they know their instance.
	repb.Capabilities_GetCapabilities_FullMethodName: {everything, nil},

	// To ask what is absent is part of an upload, too.
	repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName:     {Read | Write, named},
	repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName:     {Write, named},
	repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName:       {Read, named},
	repb.ContentAddressableStorage_GetTree_FullMethodName:              {Read, named},
	repb.ContentAddressableStorage_SplitBlob_FullMethodName:            {Read, named},
	repb.ContentAddressableStorage_SpliceBlob_FullMethodName:           {Write, named},
	repb.ContentAddressableStorage_GetChunkMapping_FullMethodName:      {Read, named},
	repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName: {Write, named},

	"/google.bytestream.ByteStream/Read":             {Read, resource},
	"/google.bytestream.ByteStream/Write":            {Write, resource},
	"/google.bytestream.ByteStream/QueryWriteStatus": {Write, resource},

	repb.ActionCache_GetActionResult_FullMethodName:    {Read, named},
	repb.ActionCache_UpdateActionResult_FullMethodName: {Cache, named},

	repb.Execution_Execute_FullMethodName:       {Execute, named},
	repb.Execution_WaitExecution_FullMethodName: {Execute, operation},

	longrunningpb.Operations_ListOperations_FullMethodName:  {Execute, operations},
	longrunningpb.Operations_GetOperation_FullMethodName:    {Execute, operation},
	longrunningpb.Operations_DeleteOperation_FullMethodName: {Execute, operation},
	longrunningpb.Operations_CancelOperation_FullMethodName: {Execute, operation},
	longrunningpb.Operations_WaitOperation_FullMethodName:   {Execute, operation},

	logpb.LogStreamService_CreateLogStream_FullMethodName: {Write, parent},

	// It says by which digests there is something to read.
	cloisterpb.History_List_FullMethodName: {Read, named},

	// What it tells of an instance depends on the caller. Draining is about all instances at once.
	cloisterpb.Fleet_Status_FullMethodName:  {Execute | Operate, nil},
	cloisterpb.Fleet_Drain_FullMethodName:   {Operate, nil},
	cloisterpb.Fleet_Undrain_FullMethodName: {Operate, nil},

	// Whoever balances load asks for the health, and has no credential.
	healthpb.Health_Check_FullMethodName: {},
	healthpb.Health_Watch_FullMethodName: {},
	healthpb.Health_List_FullMethodName:  {},

	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      {Read, nil},
	"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": {Read, nil},
}

// workers are the methods of the workers' port: what a worker needs of the store, and the queue. Whoever is given actions
// reads their inputs and makes their results, so that one right is for all of it, in the instances that it is for.
var workers = table{
	repb.Capabilities_GetCapabilities_FullMethodName: {Work, nil},

	repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName:     {Work, named},
	repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName:     {Work, named},
	repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName:       {Work, named},
	repb.ContentAddressableStorage_GetTree_FullMethodName:              {Work, named},
	repb.ContentAddressableStorage_SplitBlob_FullMethodName:            {Work, named},
	repb.ContentAddressableStorage_SpliceBlob_FullMethodName:           {Work, named},
	repb.ContentAddressableStorage_GetChunkMapping_FullMethodName:      {Work, named},
	repb.ContentAddressableStorage_RegisterChunkMapping_FullMethodName: {Work, named},

	"/google.bytestream.ByteStream/Read":             {Work, resource},
	"/google.bytestream.ByteStream/Write":            {Work, resource},
	"/google.bytestream.ByteStream/QueryWriteStatus": {Work, resource},

	repb.ActionCache_GetActionResult_FullMethodName:    {Work, named},
	repb.ActionCache_UpdateActionResult_FullMethodName: {Work, named},

	remoteworkerpb.OperationQueue_Synchronize_FullMethodName: {Work, prefixed},

	healthpb.Health_Check_FullMethodName: {},
	healthpb.Health_Watch_FullMethodName: {},
	healthpb.Health_List_FullMethodName:  {},
}

// Check returns an error that names the methods of a server for clients for which it is not written who may call them.
func Check(services map[string]grpc.ServiceInfo) error { return methods.check("methods", services) }

// CheckWorkers is Check of a server for workers.
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
	return fmt.Errorf("no right is written for %s: add it to %s of package access", strings.Join(unknown, ", "), name)
}

func (t table) known(method string) bool { _, ok := t[method]; return ok }

// errMessage is for a message of another kind than the method's.
var errMessage = errors.New("its message does not name an instance")

// named is for messages with an instance's name.
func named(m any) ([]string, error) {
	if m, ok := m.(interface{ GetInstanceName() string }); ok {
		return []string{m.GetInstanceName()}, nil
	}
	return nil, errMessage
}

// prefixed is for messages with the prefix of instances: it is about the instance of that name and all below it, which
// the right must be for by a name with an asterisk. The second of these names is of no instance, and matches what all
// below match.
func prefixed(m any) ([]string, error) {
	if m, ok := m.(interface{ GetInstanceNamePrefix() string }); ok {
		return []string{m.GetInstanceNamePrefix(), m.GetInstanceNamePrefix() + "/"}, nil
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

// operation is for messages with the name of an operation, [INSTANCE/]operations/ID. Another name says nothing of an
// instance: who knows one was told it, since they cannot be guessed.
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

// operations is for messages with the name of a collection of operations, INSTANCE or [INSTANCE/]operations.
func operations(m any) ([]string, error) {
	o, ok := m.(interface{ GetName() string })
	if !ok {
		return nil, errMessage
	}
	name := strings.Trim(o.GetName(), "/")
	if i := slices.Index(strings.Split(name, "/"), "operations"); i >= 0 {
		return operation(m)
	}
	return []string{name}, nil
}

// marks are the segments of a resource name that an instance's name can stand before.
var marks = []string{"blobs", "compressed-blobs", "uploads", "logstreams"}

// resource is for messages with the name of a resource of ByteStream. A name with several marks is of each instance
// that it could be of, whichever the service takes it for: [INSTANCE/]uploads/UUID/blobs/... is of INSTANCE alone, since
// no instance has the segment "uploads" in its name, but there may be one with "logstreams". Some clients put the
// instance before the name of a log stream once more, [INSTANCE/]logstreams/[INSTANCE/]logstreams/ID: that is of
// INSTANCE alone.
func resource(m any) ([]string, error) {
	r, ok := m.(interface{ GetResourceName() string })
	if !ok {
		return nil, errMessage
	}
	var instances []string
	segments := strings.Split(r.GetResourceName(), "/")
	for i, s := range segments {
		if !slices.Contains(marks, s) {
			continue
		}
		instance := strings.Join(segments[:i], "/")
		if len(instances) != 1 || s != "logstreams" || instance != under(instances[0], under("logstreams", instances[0])) {
			instances = append(instances, instance)
		}
		if s != "logstreams" {
			break
		}
	}
	if instances == nil {
		return nil, fmt.Errorf("resource name %+.256q has no segment of %s", r.GetResourceName(), strings.Join(marks, ", "))
	}
	return instances, nil
}

// under returns the name of what is called rest below an instance; either may be "".
func under(instance, rest string) string { return strings.Trim(instance+"/"+rest, "/") }
