// SPDX-License-Identifier: Apache-2.0

package casstatus_test

import (
	"context"
	"fmt"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/memory"
	"google.golang.org/grpc/status"
)

// A gRPC handler returns the error of a store as a status with its code.
func ExampleError() {
	store := memory.New(1 << 20)
	_, err := cas.ReadAll(context.Background(), store, cas.SHA256.Sum([]byte("absent")), 1<<10)
	err = casstatus.Error(err)
	fmt.Println(status.Code(err))

	_, err = cas.ParseDigest("a digest")
	fmt.Println(status.Code(casstatus.Error(err)), casstatus.Code(nil))
	// Output:
	// NotFound
	// InvalidArgument OK
}
