// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"bytes"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
)

// fixture returns a store, and a result with 100 bytes of stdout, 200 of stderr, and files of 300 and 400 bytes.
func fixture(t *testing.T) (*castest.Memory, *repb.ActionResult) {
	t.Helper()
	s := castest.NewMemory()
	put := func(n int) *repb.Digest {
		return must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, bytes.Repeat([]byte{'x'}, n)))(t).Proto()
	}
	return s, &repb.ActionResult{
		StdoutDigest: put(100), StderrDigest: put(200),
		OutputFiles: []*repb.OutputFile{{Path: "a", Digest: put(300)}, {Path: "b", Digest: put(400)}},
	}
}

func everything(limit int) cas.Inlining {
	return cas.Inlining{
		Function: cas.SHA256, MaxBytes: limit,
		Hints: &repb.ExecuteRequest{InlineStdout: true, InlineStderr: true, InlineOutputFiles: []string{"b", "a"}},
	}
}

func TestRule064_InlineKeepsTheLimitAndDropsFilesFirst(t *testing.T) {
	s, plain := fixture(t)
	size := proto.Size(plain)
	var most int
	for limit := range size + 1200 {
		r := proto.CloneOf(plain)
		must.Succeed(t, cas.Inline(t.Context(), s, r, everything(limit)))
		if n := proto.Size(r); n > size && n > limit {
			t.Fatalf("limit %d: the result has %d bytes", limit, n)
		}
		sizes := [4]int{len(r.StdoutRaw), len(r.StderrRaw), len(r.OutputFiles[0].Contents), len(r.OutputFiles[1].Contents)}
		expect.That(t, sizes[2]+sizes[3] <= 0 || sizes[0] != 0,
			"limit %d: files are inlined, but not stdout: %v", limit, sizes)
		most = limit
		must.Be(t, r.StdoutDigest != nil && r.OutputFiles[0].Digest != nil, "limit %d: a digest was removed", limit)
	}
	r := proto.CloneOf(plain)
	must.Succeed(t, cas.Inline(t.Context(), s, r, everything(most)))
	expect.Equal(t, len(r.StdoutRaw)+len(r.StderrRaw)+len(r.OutputFiles[0].Contents)+len(r.OutputFiles[1].Contents), 1000,
		"limit %d: inlined bytes", most)
}

func TestRule064_InlineRemovesUnwantedContents(t *testing.T) {
	s, r := fixture(t)
	r.StdoutRaw, r.OutputFiles[0].Contents = []byte("x"), []byte("x")
	want := proto.CloneOf(r)
	want.StdoutRaw, want.OutputFiles[0].Contents = nil, nil
	must.Succeed(t, cas.Inline(t.Context(), s, r, cas.Inlining{Function: cas.SHA256, Hints: &repb.GetActionResultRequest{}, MaxBytes: 1 << 20}))
	expect.That(t, proto.Equal(r, want), "got %v, want %v", r, want)
	only := &repb.ActionResult{StdoutRaw: []byte("the only copy")}
	if err := cas.Inline(t.Context(), s, only, everything(1)); err != nil || string(only.StdoutRaw) != "the only copy" {
		t.Errorf("stdout without a digest: got %q, %v", only.StdoutRaw, err)
	}
}

func TestInlineReportsAbsentAndMalformed(t *testing.T) {
	s, r := fixture(t)
	s.Delete(cas.SHA256.Sum(bytes.Repeat([]byte{'x'}, 200)))
	expect.Error(t, cas.Inline(t.Context(), s, r, everything(1<<20)), cas.ErrNotFound, "absent stderr")
	expect.That(t, len(r.StdoutRaw) == 100 && r.StderrRaw == nil, "absent stderr: got the result %v", r)
	r.StdoutDigest.Hash = "xyz"
	expect.Error(t, cas.Inline(t.Context(), s, r, everything(1<<20)), cas.ErrInvalid, "malformed digest")
}
