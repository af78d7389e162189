// SPDX-License-Identifier: Apache-2.0

package memory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestStore(t *testing.T) {
	castest.TestStore(t, func(*testing.T) cas.Store { return memory.New(0) })
	castest.TestStore(t, func(*testing.T) cas.Store { return memory.New(33 << 20) })
	castest.TestActionCache(t, func(*testing.T) cas.ActionCache { return memory.New(0) })
}

// What is stored never exceeds the limit, and Delete makes room.
func TestSizeIsBounded(t *testing.T) {
	ctx, s := t.Context(), memory.New(4000)
	var kept []cas.Digest
	for i := range 100 {
		d, err := cas.PutBytes(ctx, s, cas.SHA256, bytes.Repeat([]byte{byte(i)}, 500))
		if err == nil {
			kept = append(kept, d)
			continue
		}
		if full, ok := errors.AsType[*cas.FullError](err); !errors.Is(err, cas.ErrFull) || !ok || full.Limit != cas.LimitBytes {
			t.Fatalf("blob %d: got %v, want a FullError of LimitBytes", i, err)
		}
	}
	expect.Equal(t, len(kept), 5, "blobs of 500 bytes")
	action := cas.SHA256.Sum([]byte("action"))
	large := &repb.ActionResult{StdoutRaw: make([]byte, 1000)}
	expect.Error(t, s.Record(ctx, action, large), cas.ErrFull, "Record in a full store")
	m := cas.ChunkList{Chunks: kept[:4]}
	expect.Error(t, s.Splice(ctx, cas.SHA256.Sum(make([]byte, 2000)), m), cas.ErrFull, "Splice in a full store")
	s.Delete(kept[0])
	s.Delete(kept[1])
	for range 3 { // replacing costs nothing
		expect.Error(t, s.Record(ctx, action, large), nil, "Record after Delete")
	}
	for _, d := range kept {
		s.Delete(d)
		s.Delete(d)
	}
	room := 0
	for err := error(nil); err == nil; room++ {
		_, err = cas.PutBytes(ctx, s, cas.SHA256, bytes.Repeat([]byte{byte(room)}, 500))
	}
	if room--; room != 3 {
		t.Errorf("beside the result: got room for %d blobs, want 3", room)
	}
}

// A claimed size allocates nothing, and a blob above the limit is not read to its end.
func TestBlobAboveTheLimitIsNotBuffered(t *testing.T) {
	s, text := memory.New(1000), strings.Repeat("x", 1<<20)
	r := strings.NewReader(text)
	expect.Error(t, s.Put(t.Context(), cas.SHA256.Sum([]byte(text)), r), cas.ErrFull)
	if read := len(text) - r.Len(); read > 64<<10 {
		t.Errorf("Put read %d bytes for a store of 1000", read)
	}
}

func Example() {
	store := memory.New(64 << 20)
	instance := &cas.Instance{Store: store, Actions: store}
	ctx := context.Background()
	d, err := cas.PutBytes(ctx, instance.Store, cas.SHA256, []byte("hello"))
	if err != nil {
		log.Fatal(err)
	}
	b, err := cas.ReadAll(ctx, instance.Store, d, 100)
	fmt.Printf("%s %v\n", b, err)
	// Output: hello <nil>
}
