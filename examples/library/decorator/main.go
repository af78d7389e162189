// SPDX-License-Identifier: Apache-2.0

// Package main decorates a store with a quota.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
)

// A quota is a store that accepts a limited number of bytes. It changes Put, so it implements PutAll, too. Splice only
// joins counted chunks. Therefore cas.As may find it and all other abilities in the decorated store.
type quota struct {
	cas.Store
	left atomic.Int64
}

func (q *quota) Unwrap() cas.Store { return q.Store }

func (q *quota) take(d cas.Digest) error {
	if q.left.Add(-d.Size()) < 0 {
		q.left.Add(d.Size())
		return fmt.Errorf("blob %s: %w: no quota left", d, cas.ErrFull)
	}
	return nil
}

func (q *quota) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := q.take(d); err != nil {
		return err
	}
	return q.Store.Put(ctx, d, r)
}

func (q *quota) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	for i, b := range blobs {
		if err := q.take(b.Digest); err != nil {
			errs := append(cas.PutAll(ctx, q.Store, blobs[:i]), err)
			return append(errs, q.PutAll(ctx, blobs[i+1:])...)
		}
	}
	return cas.PutAll(ctx, q.Store, blobs)
}

func main() {
	ctx, store := context.Background(), &quota{Store: memory.New(1 << 20)}
	store.left.Store(8)
	for _, text := range []string{"hello", "world", "abc"} {
		_, err := cas.PutBytes(ctx, store, cas.SHA256, []byte(text))
		fmt.Println(text, "full:", errors.Is(err, cas.ErrFull))
	}
	_, splices := cas.As[cas.Splicer](store)
	fmt.Println("splices:", splices, "hidden:", cas.Hidden(store))
}
