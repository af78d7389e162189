// SPDX-License-Identifier: Apache-2.0

// Package proto holds the messages that are Cloister's own, and those of others' systems that its results
// carry or that it speaks with, in subdirectories. It says how their Go code is made: by go generate ./proto, with protoc 3.21 or
// later. It holds no message of the Remote Execution API, which is github.com/bazelbuild/remote-apis.
package proto

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --go_out=. --go_opt=paths=source_relative cloister/v1/metadata.proto buildbarn/resourceusage/resourceusage.proto"
