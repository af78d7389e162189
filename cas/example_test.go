// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
)

// A store maps digests to blobs. Each implementation, such as disk, remote and castest.Memory, has the same contract.
func ExampleStore() {
	ctx := context.Background()
	var store cas.Store = castest.NewMemory()

	hello, err := cas.PutBytes(ctx, store, cas.SHA256, []byte("hello, world"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(hello)

	// Missing is how clients find out what to upload.
	absent := cas.SHA256.Sum([]byte("never put"))
	missing, err := store.Missing(ctx, []cas.Digest{hello, absent})
	fmt.Println(len(missing), missing[0] == absent, err)

	r, err := store.Open(ctx, hello, 7)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	fmt.Printf("%s %v\n", b, err)

	_, err = store.Open(ctx, absent, 0)
	fmt.Println(errors.Is(err, cas.ErrNotFound))
	// Output:
	// 09ca7e4eaa6e8ae9c7d261167129184883644d07dfba7cbfbc4c8a2e08360d5b/12
	// 1 true <nil>
	// world <nil>
	// true
}

// LookupComplete treats a result whose outputs were evicted as a miss, so that the action runs again.
func ExampleLookupComplete() {
	ctx := context.Background()
	memory := castest.NewMemory()
	instance := &cas.Instance{Store: memory, Actions: memory}

	action := cas.SHA256.Sum([]byte("an encoded Action"))
	output, err := cas.PutBytes(ctx, memory, cas.SHA256, []byte("object code"))
	if err != nil {
		log.Fatal(err)
	}
	result := &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "main.o", Digest: output.Proto()}}}
	if err := memory.Record(ctx, action, result); err != nil {
		log.Fatal(err)
	}
	found, err := cas.LookupComplete(ctx, instance, action)
	fmt.Println(found.GetOutputFiles()[0].GetPath(), err)

	memory.Delete(output)
	_, err = cas.LookupComplete(ctx, instance, action)
	fmt.Println(errors.Is(err, cas.ErrNotFound))
	// Output:
	// main.o <nil>
	// true
}
