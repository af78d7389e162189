// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/cas/overlay"
)

// always returns s as every instance.
func always(s *memory.Store) cas.Instances {
	return func(string) (*cas.Instance, error) { return &cas.Instance{Store: s, Actions: s}, nil }
}

// A blob that is read through an overlay is local afterwards.
func ExampleNew() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	local, upstream := memory.New(1<<20), memory.New(1<<20)
	hello, err := cas.PutBytes(ctx, upstream, cas.SHA256, []byte("hello, world"))
	if err != nil {
		log.Fatal(err)
	}

	o, err := overlay.New(overlay.Config{
		Local: always(local), Upstream: always(upstream), Journal: filepath.Join(dir, "journal"),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer o.Close(ctx)
	main, err := o.Instance("main")
	if err != nil {
		log.Fatal(err)
	}
	b, err := cas.ReadAll(ctx, main.Store, hello, 1<<10)
	fmt.Printf("%s %v\n", b, err)
	missing, err := local.Missing(ctx, []cas.Digest{hello})
	fmt.Println("missing locally:", len(missing), err)
	// Output:
	// hello, world <nil>
	// missing locally: 0 <nil>
}
