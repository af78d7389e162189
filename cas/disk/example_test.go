// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
)

// A store keeps its blobs when it is closed and opened again.
func ExampleOpen() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	var hello cas.Digest
	for range 2 {
		cache, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20})
		if err != nil {
			log.Fatal(err)
		}
		main, err := cache.Instance("main")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("blobs at start:", cache.Stats().Blobs)
		if hello, err = cas.PutBytes(ctx, main.Store, cas.SHA256, []byte("hello, world")); err != nil {
			log.Fatal(err)
		}
		if err := cache.Close(); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(hello)
	// Output:
	// blobs at start: 0
	// blobs at start: 1
	// 09ca7e4eaa6e8ae9c7d261167129184883644d07dfba7cbfbc4c8a2e08360d5b/12
}
