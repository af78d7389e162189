// SPDX-License-Identifier: Apache-2.0

package overlay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/tests/must"
)

// A stalled upstream has no blobs, and accepts none until the end of the context.
type stalled struct{ cas.Store }

func (stalled) Put(ctx context.Context, _ cas.Digest, _ io.Reader) error {
	<-ctx.Done()
	return ctx.Err()
}

// BenchmarkWriteBack writes small blobs as a server does, in 4 calls at a time: to a disk, and to an overlay with
// WriteBack in front of a disk, without what it costs to send them.
func BenchmarkWriteBack(b *testing.B) {
	const calls, batch = 4, 3500
	writes := map[string]func(b *testing.B, s cas.Store, blobs []cas.Blob){
		"stream": func(b *testing.B, s cas.Store, blobs []cas.Blob) {
			for _, blob := range blobs {
				must.Get(cas.MissingForPut(b.Context(), s, []cas.Digest{blob.Digest}))(b)
				must.Succeed(b, s.Put(b.Context(), blob.Digest, bytes.NewReader(blob.Data)))
			}
		},
		"batch": func(b *testing.B, s cas.Store, blobs []cas.Blob) {
			must.Succeed(b, errors.Join(cas.PutAll(b.Context(), s, blobs)...))
		},
	}
	for name, size := range map[string]int{"stream": 1, "batch": batch} {
		for _, layers := range []string{"disk", "overlay"} {
			b.Run(name+"/"+layers, func(b *testing.B) {
				instances, blobs := benchInstances(b, layers), benchBlobs(b.N)
				var group sync.WaitGroup
				b.ReportAllocs()
				b.ResetTimer()
				before := cpuTime(b)
				for c := range calls {
					group.Go(func() {
						for at, end := c*b.N/calls, (c+1)*b.N/calls; at < end; at += size {
							writes[name](b, must.Get(instances("main"))(b).Store, blobs[at:min(at+size, end)])
						}
					})
				}
				group.Wait()
				b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// benchInstances returns the instances of a disk, or of an overlay in front of one.
func benchInstances(b *testing.B, layers string) cas.Instances {
	b.Helper()
	cache := must.Get(disk.Open(disk.Config{Dir: b.TempDir(), MaxBytes: 64 << 30}))(b)
	b.Cleanup(func() { cache.Close() })
	if layers == "disk" {
		return cache.Instance
	}
	m := castest.NewMemory()
	return open(b, overlay.Config{Local: cache.Instance, Upstream: one(stalled{m}, m), Policy: overlay.WriteBack}).Instance
}

// benchBlobs returns n different blobs of 1 KiB.
func benchBlobs(n int) []cas.Blob {
	blobs := make([]cas.Blob, n)
	for i := range blobs {
		data := fmt.Appendf(nil, "%01024d", i)
		blobs[i] = cas.Blob{Digest: cas.SHA256.Sum(data), Data: data}
	}
	return blobs
}

// cpuTime returns the CPU time of this process in nanoseconds.
func cpuTime(b *testing.B) int64 {
	b.Helper()
	var u syscall.Rusage
	must.Succeed(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return u.Utime.Nano() + u.Stime.Nano()
}
