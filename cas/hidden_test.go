// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/tests/expect"
)

// A store that embeds another one without Unwrap loses the abilities that As would find. Hidden lists them.
func TestHidden(t *testing.T) {
	m := castest.NewMemory()
	both := []string{"Batcher", "Splicer"}
	type field struct {
		opaque
		next cas.Store
	}
	for name, test := range map[string]struct {
		store cas.Store
		want  []string
	}{
		"the store itself":        {m, nil},
		"with Unwrap":             {decorator{m}, nil},
		"embedded":                {opaque{m}, both},
		"a pointer":               {&opaque{m}, both},
		"below one with Unwrap":   {decorator{opaque{m}}, both},
		"around one with Unwrap":  {opaque{decorator{m}}, both},
		"in an unexported field":  {field{next: m}, both},
		"a nil store":             {nil, nil},
		"decorates nothing":       {decorator{}, nil},
		"forwards one, hides one": {&forwarding{opaque{m}}, []string{"Splicer"}},
	} {
		expect.Slices(t, cas.Hidden(test.store), test.want, "%s", name)
	}
}

type forwarding struct{ opaque }

func (f *forwarding) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	return cas.PutAll(ctx, f.Store, blobs)
}

// A counter counts the bytes that are put into the store that it decorates. It changes Put, so it has PutAll and
// Splice, too; everything else is found through Unwrap.
type counter struct {
	cas.Store
	bytes atomic.Int64
}

// Unwrap lets cas.As find the other abilities of the store.
func (c *counter) Unwrap() cas.Store { return c.Store }

func (c *counter) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	err := c.Store.Put(ctx, d, r)
	if err == nil {
		c.bytes.Add(d.Size())
	}
	return err
}

func (c *counter) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := cas.PutAll(ctx, c.Store, blobs)
	for i, err := range errs {
		if err == nil {
			c.bytes.Add(blobs[i].Digest.Size())
		}
	}
	return errs
}

func TestDecorator(t *testing.T) {
	castest.TestDecorator(t, func(*testing.T) cas.Store { return castest.NewMemory() },
		func(s cas.Store) cas.Store { return &counter{Store: s} })
	castest.TestDecorator(t, func(*testing.T) cas.Store { return castest.NewMemory() },
		func(s cas.Store) cas.Store { return opaque{s} }, "Batcher", "Splicer")
}

// A decorator embeds the store, changes some methods, and has Unwrap so that it hides nothing else.
func Example_decorator() {
	ctx := context.Background()
	store := &counter{Store: memory.New(1 << 20)}
	errs := cas.PutAll(ctx, store, []cas.Blob{{Digest: cas.SHA256.Sum([]byte("hello")), Data: []byte("hello")}})
	if errs[0] != nil {
		log.Fatal(errs[0])
	}
	_, splices := cas.As[cas.Splicer](store)
	fmt.Println(store.bytes.Load(), splices, cas.Hidden(store))

	careless := struct{ cas.Store }{memory.New(1 << 20)} // no Unwrap
	fmt.Println(cas.Hidden(careless))
	// Output:
	// 5 true []
	// [Batcher Splicer]
}
