// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"errors"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// TestActionCache checks that action caches keep the contract of cas.ActionCache. Each must be empty.
func TestActionCache(t *testing.T, newCache func(t *testing.T) cas.ActionCache) {
	big := result(2)
	big.StdoutRaw, _ = Blob(1, 50_000)
	_, action := Blob(1, 100)
	_, other := Blob(2, 100)
	longer, err := cas.NewDigest(action.Function(), action.Hash(), action.Size()+1)
	if err != nil {
		t.Fatal(err)
	}
	type cache struct {
		*testing.T
		cas.ActionCache
	}
	wantMiss := func(c cache, d cas.Digest) {
		c.Helper()
		if r, err := c.Lookup(c.Context(), d); !errors.Is(err, cas.ErrNotFound) {
			c.Errorf("Lookup of %s: got %v, %v, want ErrNotFound", d, r, err)
		}
	}
	wantHit := func(c cache, d cas.Digest, want *repb.ActionResult) {
		c.Helper()
		if got, err := c.Lookup(c.Context(), d); err != nil || !proto.Equal(got, want) {
			c.Errorf("Lookup of %s:\n got %v, %v\nwant %v", d, got, err, want)
		}
	}
	record := func(c cache, d cas.Digest, r *repb.ActionResult) {
		c.Helper()
		if err := c.Record(c.Context(), d, r); err != nil {
			c.Errorf("Record of %s: %v", d, err)
		}
	}
	// In this order: a cache that all cases share is empty only for the first.
	for _, test := range []struct {
		name string
		run  func(c cache)
	}{
		{"MissIsNotFound", func(c cache) { wantMiss(c, action) }},
		{"RecordThenLookup", func(c cache) {
			record(c, action, result(7))
			wantHit(c, action, result(7))
		}},
		{"EmptyResult", func(c cache) {
			record(c, action, &repb.ActionResult{})
			wantHit(c, action, &repb.ActionResult{})
		}},
		{"RecordReplaces", func(c cache) {
			for _, r := range []*repb.ActionResult{result(1), big, result(3)} {
				record(c, action, r)
				wantHit(c, action, r)
			}
		}},
		{"KeyIsWholeDigest", func(c cache) {
			record(c, action, result(1))
			wantMiss(c, longer)
			wantMiss(c, other)
			record(c, longer, result(2))
			record(c, other, result(3))
			wantHit(c, action, result(1))
			wantHit(c, longer, result(2))
			wantHit(c, other, result(3))
		}},
		{"MissingArgumentsAreInvalid", func(c cache) {
			for what, err := range map[string]error{
				"Record of nil":             c.Record(c.Context(), action, nil),
				"Record of the zero Digest": c.Record(c.Context(), cas.Digest{}, result(1)),
			} {
				if !errors.Is(err, cas.ErrInvalid) {
					c.Errorf("%s: got %v, want ErrInvalid", what, err)
				}
			}
			if r, err := c.Lookup(c.Context(), cas.Digest{}); !errors.Is(err, cas.ErrInvalid) {
				c.Errorf("Lookup of the zero Digest: got %v, %v, want ErrInvalid", r, err)
			}
		}},
		{"ResultBelongsToCaller", func(c cache) {
			r := result(1)
			record(c, action, r)
			r.ExitCode = 99
			got, err := c.Lookup(c.Context(), action)
			if err != nil {
				c.Fatal(err)
			}
			got.OutputFiles[0].Path = "changed"
			wantHit(c, action, result(1))
		}},
		{"ConcurrentRecordAndLookup", func(c cache) {
			record(c, action, result(1))
			var wg sync.WaitGroup
			for i := range int32(4) {
				wg.Go(func() {
					for range 20 {
						record(c, action, result(i+1))
					}
				})
				wg.Go(func() {
					for range 20 {
						r, err := c.Lookup(c.Context(), action)
						if err != nil || !proto.Equal(r, result(r.ExitCode)) {
							c.Errorf("Lookup during Record: got %v, %v, want one of the results", r, err)
						}
					}
				})
			}
			wg.Wait()
		}},
		{"CancelledContext", func(c cache) {
			record(c, action, result(1))
			_, err := c.Lookup(cancelled(c.T), action)
			wantCancelled(c.T, "Lookup", err)
			wantCancelled(c.T, "Record", c.Record(cancelled(c.T), action, result(2)))
			wantHit(c, action, result(1))
		}},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(cache{t, newCache(t)}) })
	}
}

// result returns a result that its exit code determines.
func result(exit int32) *repb.ActionResult {
	_, out := Blob(byte(exit), 10)
	aux, err := anypb.New(out.Proto())
	if err != nil {
		panic(err) // only an invalid message fails
	}
	return &repb.ActionResult{
		OutputFiles: []*repb.OutputFile{{Path: "bin/cc", Digest: out.Proto(), IsExecutable: true}},
		StdoutRaw:   []byte("ünï\x00"),
		ExitCode:    exit,
		ExecutionMetadata: &repb.ExecutedActionMetadata{
			Worker: "w1", AuxiliaryMetadata: []*anypb.Any{aux},
		},
	}
}
