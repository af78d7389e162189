// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Command imports writes to standard output the descriptors of all that remoteworker.proto imports, for protoc, as the
// modules of this one have them: their source files are in no module.
package main

import (
	"os"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	all := &descriptorpb.FileDescriptorSet{}
	seen := map[string]bool{}
	var add func(protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		all.File = append(all.File, protodesc.ToFileDescriptorProto(f))
	}
	add(repb.File_build_bazel_remote_execution_v2_remote_execution_proto)
	data, err := proto.Marshal(all)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(data)
}
