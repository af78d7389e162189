// SPDX-License-Identifier: Apache-2.0

// Command descriptors prints the Buildbarn protocols that Cloister implements as a FileDescriptorSet, from Buildbarn's
// generated code, which cannot be linked with Cloister's because of equal names.
package main

import (
	"fmt"
	"os"

	"github.com/buildbarn/bb-remote-execution/pkg/proto/remoteworker"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/resourceusage"
	"github.com/buildbarn/bb-remote-execution/pkg/proto/runner"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	set := &descriptorpb.FileDescriptorSet{}
	for _, file := range []protoreflect.FileDescriptor{
		remoteworker.File_pkg_proto_remoteworker_remoteworker_proto,
		resourceusage.File_pkg_proto_resourceusage_resourceusage_proto,
		runner.File_pkg_proto_runner_runner_proto,
	} {
		set.File = append(set.File, protodesc.ToFileDescriptorProto(file))
	}
	b, err := proto.Marshal(set)
	if err == nil {
		_, err = os.Stdout.Write(b)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "descriptors:", err)
		os.Exit(1)
	}
}
