// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"context"
	"fmt"
	"log"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/object"
)

// A blob put into a bucket whose lifecycle rule deletes objects after 30 days.
func ExampleOpen() {
	ctx := context.Background()
	client, err := object.Open(ctx, object.Config{URL: "s3://builds/cache?endpoint=https://s3.example.com&expire_days=30"})
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
