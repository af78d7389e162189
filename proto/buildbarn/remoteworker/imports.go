// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Command imports writes the descriptors of the imports of remoteworker.proto to standard output, for protoc. Their
// .proto files are in no Go module.
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
