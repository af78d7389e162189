// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func (c *client) capabilities(t *testing.T) *repb.ServerCapabilities {
	t.Helper()
	r, err := c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{})
	must.Succeed(t, err)
	return r
}

func TestRule001_CapabilitiesHaveBothParts(t *testing.T) {
	alone := serve(t, casserver.Config{}).capabilities(t)
	if alone.CacheCapabilities == nil || alone.ExecutionCapabilities != nil {
		t.Errorf("cache alone: got %v", alone)
	}
	both := serve(t, casserver.Config{Execution: &repb.ExecutionCapabilities{}}).capabilities(t)
	if both.CacheCapabilities == nil || both.ExecutionCapabilities == nil {
		t.Errorf("cache and execution: got %v", both)
	}
}

func TestRule008_BatchLimitIsExact(t *testing.T) {
	for limit, want := range map[int64]int64{0: 4_000_000, 100: 100, 5_000_000: 4_000_000} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			c := serve(t, casserver.Config{MaxBatchBytes: limit})
			n := c.capabilities(t).CacheCapabilities.MaxBatchTotalSizeBytes
			if n != want {
				t.Fatalf("max_batch_total_size_bytes is %d, want %d", n, want)
			}
			for _, over := range []int{0, 1} {
				a, b := noise(int(n)-10), noise(10+over)
				want := []codes.Code{codes.OK, codes.InvalidArgument}[over]
				_, err := c.BatchUpdateBlobs(t.Context(), updates(a, b))
				wantCode(t, err, want)
				c.put(t, a)
				c.put(t, b)
				_, err = c.BatchReadBlobs(t.Context(), reads(a, b))
				wantCode(t, err, want)
				bad := reads(a, b)
				bad.Digests = append(bad.Digests, &repb.Digest{Hash: sum(a).Hash(), SizeBytes: -1})
				slices.Reverse(bad.Digests)
				_, err = c.BatchReadBlobs(t.Context(), bad)
				wantCode(t, err, want)
			}
		})
	}
}

func TestRule010_LargerBlobIsAlwaysInvalid(t *testing.T) {
	c := serve(t, casserver.Config{MaxBlobBytes: 10})
	if n := c.capabilities(t).CacheCapabilities.MaxCasBlobSizeBytes; n != 10 {
		t.Errorf("max_cas_blob_size_bytes is %d, want 10", n)
	}
	for n, want := range map[int]codes.Code{10: codes.OK, 11: codes.InvalidArgument} {
		data := noise(n)
		says := []string{sum(data).String(), "10 bytes"}
		wantCode(t, c.uploadTo(t.Context(), "", data), want, says...)
		r, err := c.BatchUpdateBlobs(t.Context(), updates(data))
		if err == nil {
			err = status.ErrorProto(r.Responses[0].Status)
		}
		wantCode(t, err, want, says...)
		for _, r := range []*repb.ActionResult{
			{StdoutRaw: []byte(data)},
			{StderrRaw: []byte(data)},
			{OutputFiles: []*repb.OutputFile{{Path: "f", Contents: []byte(data)}}},
		} {
			wantCode(t, c.record(t, r), want, says...)
		}
	}
	if n := serve(t, casserver.Config{}).capabilities(t).CacheCapabilities.MaxCasBlobSizeBytes; n != 0 {
		t.Errorf("without a limit max_cas_blob_size_bytes is %d, want 0", n)
	}
}

func TestRule128_RequestMetadataMayBeAnything(t *testing.T) {
	c := serve(t, casserver.Config{})
	d := c.put(t, "data")
	for _, value := range []string{"", "no message \xff\xff", "\x0a\x02xy"} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "build.bazel.remote.execution.v2.requestmetadata-bin", value)
		for _, call := range c.calls() {
			if code := codes.OK; call.name != "GetTree" && call.name != "GetActionResult" {
				wantCode(t, call.do(ctx, target{digest: d.Proto()}), code)
			}
		}
	}
}

func TestRule005_006_CapabilitiesDependOnCaller(t *testing.T) {
	for _, may := range []struct{ execute, update bool }{{true, true}, {true, false}, {false, true}, {false, false}} {
		c := serve(t, casserver.Config{
			Execution: &repb.ExecutionCapabilities{ExecEnabled: true},
			Rights: func(_ context.Context, instance string) (execute, update bool) {
				return may.execute && instance == "", may.update && instance == ""
			},
		})
		r := c.capabilities(t)
		if got := r.ExecutionCapabilities.ExecEnabled; got != may.execute {
			t.Errorf("%+v: exec_enabled is %t", may, got)
		}
		if got := r.CacheCapabilities.ActionCacheUpdateCapabilities.UpdateEnabled; got != may.update {
			t.Errorf("%+v: update_enabled is %t", may, got)
		}
		other, err := c.GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{InstanceName: "other"})
		if err != nil || other.ExecutionCapabilities.ExecEnabled || other.CacheCapabilities.ActionCacheUpdateCapabilities.UpdateEnabled {
			t.Errorf("%+v: in another instance got %v, %v", may, other, err)
		}
	}
	// Rights do not enable what the server does not support.
	all := func(context.Context, string) (execute, update bool) { return true, true }
	r := serve(t, casserver.Config{Execution: &repb.ExecutionCapabilities{}, ReadOnlyActions: true, Rights: all}).capabilities(t)
	if r.ExecutionCapabilities.ExecEnabled || r.CacheCapabilities.ActionCacheUpdateCapabilities.UpdateEnabled {
		t.Errorf("a right enabled something unsupported: %v", r)
	}
}
