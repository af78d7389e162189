// SPDX-License-Identifier: Apache-2.0

// Package runnerpb is the Go code of package buildbarn.runner: the protocol by which a worker of Buildbarn has a command
// run in an input root that it has laid out itself. It is generated, apart from this comment, by go generate
// ./proto/buildbarn/runner; on the wire it is Buildbarn's, and compared with it by the tests in tests/interop.
package runnerpb

//go:generate sh -c "GOBIN=$(cd ../../.. && pwd)/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1"
//go:generate sh -c "protoc -I ../.. --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=../../../bin/protoc-gen-go-grpc --go_out=../.. --go_opt=paths=source_relative --go-grpc_out=../.. --go-grpc_opt=paths=source_relative buildbarn/runner/runner.proto"
