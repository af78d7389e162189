// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// connect is serveAs without checking the store afterwards; cfg may set Binary.
func connect(t testing.TB, cfg bazelrun.ServerConfig) *client {
	t.Helper()
	confined(t)
	if cfg.Binary == "" {
		cfg.Binary = built.Path(t)
	}
	cfg.Home = filepath.Dir(cfg.Dir)
	return start(t, cfg)
}

// kill kills the server.
func (c *client) kill() {
	*c.ended = true
	c.server.Kill()
}

// random returns size bytes determined by rnd.
func random(rnd *rand.Rand, size int) []byte {
	b := make([]byte, size)
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rnd.Uint32())
	}
	rand.NewChaCha8(seed).Read(b)
	return b
}

// seeded returns a deterministic generator.
func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

// batch uploads blobs in one call and returns an error for each.
func (c *client) batch(blobs [][]byte) []error {
	var reqs []*repb.BatchUpdateBlobsRequest_Request
	for _, b := range blobs {
		reqs = append(reqs, blob(b))
	}
	errs, err := c.update(reqs...)
	if err != nil {
		errs = slices.Repeat([]error{err}, len(blobs))
	}
	return errs
}

// stream uploads a blob; it returns nil if the server has acknowledged all of it.
func (c *client) stream(b []byte) error {
	d := cas.SHA256.Sum(b)
	r, err := c.write(pieces(c.writeName(d.Proto()), b, 64<<10)...)
	if err == nil && r.CommittedSize != d.Size() {
		err = fmt.Errorf("committed %d of %d bytes", r.CommittedSize, d.Size())
	}
	return err
}

// store uploads a blob, by a batch if it is small.
func (c *client) store(b []byte) error {
	if len(b) < 64<<10 {
		return c.batch([][]byte{b})[0]
	}
	return c.stream(b)
}

// absent returns which blobs are missing, and so marks the others as used.
func (c *client) absent(ctx context.Context, ds ...*repb.Digest) ([]*repb.Digest, error) {
	resp, err := c.cas.FindMissingBlobs(ctx, &repb.FindMissingBlobsRequest{InstanceName: c.instance, BlobDigests: ds})
	return resp.GetMissingBlobDigests(), err
}

// wantAll checks that all blobs are present and reads them.
func (c *client) wantAll(ds []*repb.Digest) {
	c.Helper()
	missing, err := c.absent(c.Context(), ds...)
	must.Be(c, err == nil && len(missing) == 0, "%d of %d blobs are missing: %v", len(missing), len(ds), err)
	for _, d := range ds {
		c.get(d)
	}
}

// fill uploads blobs of a size until the store is full, and returns the stored digests, the rejected blob and its
// error.
func (c *client) fill(rnd *rand.Rand, size int, limit int) (stored []*repb.Digest, refused []byte, err error) {
	c.Helper()
	if stored, refused, err = c.tryFill(rnd, size, limit); refused == nil {
		c.Fatalf("all %d bytes in blobs of %d were stored, want some rejected", limit, size)
	}
	return stored, refused, err
}

// tryFill is fill, except that no blob may be rejected.
func (c *client) tryFill(rnd *rand.Rand, size int, limit int) (stored []*repb.Digest, refused []byte, err error) {
	c.Helper()
	for total := 0; total < limit; total += size {
		b := random(rnd, size)
		err := c.store(b)
		if status.Code(err) == codes.ResourceExhausted {
			return stored, b, err
		}
		must.Succeed(c, err)
		stored = append(stored, cas.SHA256.Sum(b).Proto())
	}
	return stored, nil, nil
}

// TestRule024_ShortLeases checks that a store whose leases last a second accepts any number of blobs, and keeps those
// reported present for that second.
func TestRule024_ShortLeases(t *testing.T) {
	t.Parallel()
	const lease, budget = time.Second, 8 << 20
	c := connect(t, bazelrun.ServerConfig{
		Dir: filepath.Join(t.TempDir(), "store"), MaxSize: fmt.Sprint(budget), Args: []string{"--lease", lease.String()},
	})
	var (
		mu       sync.Mutex
		stored   []*repb.Digest // guarded by mu
		enough   atomic.Bool
		refusals int
		writer   sync.WaitGroup
	)
	writer.Go(func() {
		rnd := seeded(2)
		for total := 0; total < 3*budget || !enough.Load(); {
			b := random(rnd, 1+rnd.IntN([]int{1000, 50_000, 300_000}[rnd.IntN(3)]))
			err := c.store(b)
			if status.Code(err) == codes.ResourceExhausted && refusals < 10_000 {
				refusals++
				time.Sleep(10 * time.Millisecond)
				continue
			}
			if err != nil {
				t.Errorf("after %d bytes and %d rejections: %v", total, refusals, err)
				return
			}
			total += len(b)
			mu.Lock()
			stored = append(stored, cas.SHA256.Sum(b).Proto())
			mu.Unlock()
		}
	})
	end := func() {
		enough.Store(true)
		writer.Wait()
	}
	defer end()
	rnd := seeded(1)
	kept, late := 0, 0 // rounds of reading
	for range 40 {
		if kept == 6 || t.Failed() {
			break
		}
		var sample []*repb.Digest
		mu.Lock()
		recent := stored[max(0, len(stored)-200):]
		for range min(10, len(recent)) {
			sample = append(sample, recent[rnd.IntN(len(recent))])
		}
		mu.Unlock()
		asked := time.Now()
		missing := must.Get(c.absent(t.Context(), sample...))(t)
		present := slices.DeleteFunc(sample, func(d *repb.Digest) bool {
			return slices.ContainsFunc(missing, func(m *repb.Digest) bool { return m.Hash == d.Hash })
		})
		time.Sleep(lease / 2)
		if len(present) == 0 {
			continue
		}
		resp := must.Get(c.cas.BatchReadBlobs(t.Context(), &repb.BatchReadBlobsRequest{Digests: present}))(t)
		if time.Since(asked) >= lease {
			late++ // the lease has ended
			continue
		}
		kept++
		for _, r := range resp.Responses {
			if err := status.ErrorProto(r.Status); err != nil || cas.SHA256.Sum(r.Data).Hash() != r.Digest.Hash {
				t.Errorf("blob %v was reported present, then: %v", r.Digest, err)
			}
		}
	}
	end()
	missing, err := c.absent(t.Context(), stored...)
	expect.That(t, err == nil && len(missing) != 0 && kept != 0,
		"got %d evicted blobs and %d checks within the lease, want some of each: %v", len(missing), kept, err)
	t.Logf("%d blobs stored after %d rejections, %d evicted; %d checks within the lease, %d after it",
		len(stored), refusals, len(missing), kept, late)
}

// TestAcknowledgedBlobsSurviveKill checks that all acknowledged blobs survive kill -9 during writes.
func TestAcknowledgedBlobsSurviveKill(t *testing.T) {
	t.Parallel()
	const rounds, writers = 10, 4
	dir := filepath.Join(t.TempDir(), "store")
	rnd := seeded(9)
	var acknowledged []*repb.Digest
	interrupted := map[string]*repb.Digest{} // by hash
	for range rounds {
		c := connect(t, bazelrun.ServerConfig{Dir: dir, NoJobs: true})
		c.wantAll(acknowledged)
		var mu sync.Mutex
		var all sync.WaitGroup
		before := len(acknowledged)
		// note records the result of an upload and reports whether to continue.
		note := func(b []byte, err error) bool {
			d := cas.SHA256.Sum(b).Proto()
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				interrupted[d.Hash] = d
				return false
			}
			acknowledged = append(acknowledged, d)
			return true
		}
		for i := range writers {
			rnd := rand.New(rand.NewPCG(rnd.Uint64(), rnd.Uint64()))
			all.Go(func() {
				for range 200 {
					if i%2 == 0 {
						b := random(rnd, 1+rnd.IntN(600_000))
						if !note(b, c.stream(b)) {
							return
						}
						continue
					}
					blobs := make([][]byte, 1+rnd.IntN(20))
					for j := range blobs {
						blobs[j] = random(rnd, 1+rnd.IntN(20_000))
					}
					more := true
					for j, err := range c.batch(blobs) {
						more = note(blobs[j], err) && more
					}
					if !more {
						return
					}
				}
			})
		}
		must.Hold(t, "a blob is acknowledged", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(acknowledged) > before
		})
		time.Sleep(time.Duration(5+rnd.IntN(150)) * time.Millisecond)
		c.kill()
		all.Wait()
	}
	c := connect(t, bazelrun.ServerConfig{Dir: dir, NoJobs: true})
	c.wantAll(acknowledged)
	// Interrupted uploads must be complete or absent.
	var whole []*repb.Digest
	for _, d := range interrupted {
		missing := must.Get(c.absent(t.Context(), d))(t)
		if len(missing) == 0 {
			whole = append(whole, d)
		}
	}
	c.wantAll(whole)
	expect.That(t, len(acknowledged) != 0 && len(interrupted) != 0,
		"got %d acknowledged and %d interrupted blobs, want some of each", len(acknowledged), len(interrupted))
	t.Logf("%d kills: 0 of %d acknowledged blobs lost; of %d interrupted ones, %d are complete and the others absent",
		rounds, len(acknowledged), len(interrupted), len(whole))
}

// onSmallDisk returns a program that runs cloister with a tmpfs on dir in its own mount namespace. The options are
// those of the mount; ballast is a shell command that fills space in dir.
func onSmallDisk(t *testing.T, dir, options, ballast string) string {
	t.Helper()
	flags := "--mount"
	if os.Geteuid() != 0 {
		flags += " --user --map-root-user"
	}
	if out, err := exec.CommandContext(t.Context(), "unshare",
		append(strings.Fields(flags), "mount", "-t", "tmpfs", "none", dir)...).CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("unshare and mount: %v: %s", err, out))
	}
	path := filepath.Join(t.TempDir(), "cloister")
	script := fmt.Sprintf("#!/bin/sh\nexec unshare %s --propagation private -- sh -c 'set -e; mount -t tmpfs -o %s none %s; (cd %[3]s; %s); exec %s \"$@\"' sh \"$@\"\n",
		flags, options, dir, ballast, built.Path(t))
	must.Succeed(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// TestFullDisk checks that writes to a full disk fail with a reason, that nothing else suffers, and that writes succeed
// once there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name             string
		options, ballast string
		sizes            []int // of the blobs to store, each until the disk is full
	}{
		// Smaller blobs still fit when larger ones do not.
		{"bytes", "size=40m", "head -c 16M /dev/zero > ballast", []int{1 << 20, 100_000, 10_000}},
		// Small blobs need no file of their own and are not rejected.
		{"inodes", "size=512m,nr_inodes=1000", "mkdir ballast; cd ballast; touch $(seq 930)", []int{100_000}},
	} {
		t.Run(c.name, func(t *testing.T) {
			mount := t.TempDir()
			client := connect(t, bazelrun.ServerConfig{
				Binary: onSmallDisk(t, mount, c.options, c.ballast), Dir: filepath.Join(mount, "store"), MaxSize: "400MiB",
			})
			checkFullDisk(client, filepath.Join(fmt.Sprintf("/proc/%d/root", client.server.PID), mount), c.sizes)
		})
	}
}

// checkFullDisk fills the disk, whose root is visible at disk.
func checkFullDisk(c *client, disk string, sizes []int) {
	rnd := seeded(5)
	last := job{
		script:  "for f in a b c d; do head -c 1000000 /dev/urandom > $f; done",
		outputs: []string{"a", "b", "c", "d"},
	}
	uploaded := c.prepare(last)
	// Run the action once before, so that everything it needs besides its outputs is stored.
	c.wantSuccess("before the disk is full", c.request(uploaded, skip))
	var stored []*repb.Digest
	var refused [][]byte
	for _, size := range sizes {
		ds, b, err := c.fill(rnd, size, 256<<20)
		if !strings.Contains(err.Error(), "room") && !strings.Contains(err.Error(), "space") {
			c.Errorf("rejection of %d bytes: got %v, want the reason", size, err)
		}
		stored, refused = append(stored, ds...), append(refused, b)
	}
	c.wantCode("outputs that do not fit", c.request(uploaded, skip).err, codes.ResourceExhausted)
	c.wantAll(stored)
	for _, b := range refused {
		expect.Equal(c, len(must.Get(c.absent(c.Context(), cas.SHA256.Sum(b).Proto()))(c)), 1, "rejected blob")
	}
	expect.Equal(c, len(must.Get(os.ReadDir(filepath.Join(disk, "store", "tmp")))(c)), 0, "temporary files")

	must.Succeed(c, os.RemoveAll(filepath.Join(disk, "ballast")))
	for _, b := range refused {
		expect.Error(c, c.store(b), nil, "after space was freed")
		stored = append(stored, cas.SHA256.Sum(b).Proto())
	}
	_, r := c.wantSuccess("after space was freed", c.request(uploaded, skip))
	c.wantOutputs("after space was freed", r, "file a", "file b", "file c", "file d")
	c.wantAll(stored)
	c.Logf("%d blobs stored and %d rejected; all are present once there is space", len(stored)-len(refused), len(refused))
}
