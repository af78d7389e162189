// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"log"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
)

// A blob put into a server's instance "main".
func ExampleDial() {
	ctx := context.Background()
	client, err := remote.Dial(ctx, "grpc://127.0.0.1:8980")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	main, err := client.Instance("main")
	if err != nil {
		log.Fatal(err)
	}
	digest, err := cas.PutBytes(ctx, main.Store, cas.SHA256, []byte("hello, world"))
	fmt.Println(digest, err)
}
