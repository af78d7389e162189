// SPDX-License-Identifier: Apache-2.0

// Package cloisterpb is the Go code of package cloister.v1: what a worker adds to the metadata of a result, and what
// operators ask the process that holds a store or executes actions. It is generated, apart from this comment: the
// metadata by go generate ./proto, and the services, whose generator is no module of ours, by go generate
// ./proto/cloister/v1.
package cloisterpb

//go:generate sh -c "GOBIN=$(cd ../../.. && pwd)/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1"
//go:generate sh -c "protoc -I ../.. --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=../../../bin/protoc-gen-go-grpc --go_out=../.. --go_opt=paths=source_relative --go-grpc_out=../.. --go-grpc_opt=paths=source_relative cloister/v1/store.proto cloister/v1/history.proto cloister/v1/fleet.proto"
