// SPDX-License-Identifier: Apache-2.0

// Package remoteworkerpb is the Go code of package buildbarn.remoteworker: the protocol by which a worker takes actions
// from a scheduler, Buildbarn's or ours. It is generated, apart from this comment, by go generate
// ./proto/buildbarn/remoteworker; on the wire it is Buildbarn's, and compared with it by the tests in tests/interop.
package remoteworkerpb

//go:generate sh -c "mkdir -p ../../../bin && go run imports.go > ../../../bin/imports.pb"
//go:generate sh -c "GOBIN=$(cd ../../.. && pwd)/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1"
//go:generate sh -c "protoc -I ../.. --descriptor_set_in=../../../bin/imports.pb --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-grpc=../../../bin/protoc-gen-go-grpc --go_out=../.. --go_opt=paths=source_relative --go-grpc_out=../.. --go-grpc_opt=paths=source_relative buildbarn/remoteworker/remoteworker.proto"
