// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

func init() {
	// Of this process; cloister gets its own.
	os.Setenv("AWS_ACCESS_KEY_ID", peers.AccessKey)
	os.Setenv("AWS_SECRET_ACCESS_KEY", peers.SecretKey)
}

// A bucket is one of a real S3 server that keeps objects in files.
type bucket struct {
	*peers.Server
	name    string
	options peers.Options
	admin   *minio.Client
}

// newBucket starts an S3 server and makes a bucket. Kinds of buckets are plain, versioned and locked.
func newBucket(t *testing.T, kind string) *bucket {
	t.Helper()
	b := &bucket{name: kind, options: peers.Options{Dir: t.TempDir(), Args: []string{"--versioning-dir", t.TempDir()}}}
	b.start(t)
	must.Succeed(t, b.admin.MakeBucket(t.Context(), b.name, minio.MakeBucketOptions{ObjectLocking: kind == "locked"}))
	if kind == "versioned" {
		must.Succeed(t, b.admin.EnableVersioning(t.Context(), b.name))
	}
	if kind == "locked" {
		mode, days, unit := minio.Governance, uint(1), minio.Days
		must.Succeed(t, b.admin.SetBucketObjectLockConfig(t.Context(), b.name, &mode, &days, &unit))
	}
	return b
}

// start starts the server, again at the same address.
func (b *bucket) start(t *testing.T) {
	t.Helper()
	b.Server = launch(t, peers.VersityGW, b.options)
	b.options.Listen = b.Addr
	var err error
	b.admin, err = minio.New(b.Addr, &minio.Options{Creds: credentials.NewStaticV4(peers.AccessKey, peers.SecretKey, "")})
	must.Succeed(t, err)
}

// freeze stops the server without ending it, until the returned function or the end of the test.
func freeze(t *testing.T, b *bucket) (thaw func()) {
	t.Helper()
	must.Succeed(t, syscall.Kill(b.PID, syscall.SIGSTOP))
	// Until one thread has received the signal, the others may still answer.
	must.Hold(t, "all threads have stopped", func() bool {
		stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", b.PID))
		return len(stats) > 0 && !slices.ContainsFunc(stats, func(name string) bool {
			text, err := os.ReadFile(name)
			return err == nil && !strings.Contains(string(text), ") T ")
		})
	})
	thaw = sync.OnceFunc(func() { must.Succeed(t, syscall.Kill(b.PID, syscall.SIGCONT)) })
	t.Cleanup(thaw)
	return thaw
}

// url returns the bucket's URL for --store, with a prefix.
func (b *bucket) url(prefix string) string {
	return fmt.Sprintf("s3://%s/%s?endpoint=http://%s&expire_days=10", b.name, prefix, b.Addr)
}

// open returns a client for a prefix of the bucket.
func (b *bucket) open(t *testing.T, prefix string, observe func(context.Context, object.Call)) *object.Client {
	t.Helper()
	c := must.Get(object.Open(t.Context(), object.Config{URL: b.url(prefix), Observe: observe}))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

// store returns the instance "" of a client for a prefix of the bucket.
func (b *bucket) store(t *testing.T, prefix string) *object.Store {
	t.Helper()
	return must.Get(b.open(t, prefix, nil).Store(""))(t)
}

// files returns the paths of objects below a prefix.
func (b *bucket) files(t *testing.T, prefix string) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(b.options.Dir, b.name, prefix), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			paths = append(paths, path)
		}
		return err
	})
	if !errors.Is(err, fs.ErrNotExist) {
		must.Succeed(t, err)
	}
	return paths
}

// file returns the path of the object with a blob of the instance "".
func (b *bucket) file(prefix string, d cas.Digest) string {
	return filepath.Join(b.options.Dir, b.name, prefix, "!", "blobs", d.Function().String(), strings.ReplaceAll(d.String(), "/", "-"))
}

// wantObject checks that the bucket has a blob.
func (b *bucket) wantObject(t *testing.T, prefix string, d cas.Digest) {
	t.Helper()
	data, err := os.ReadFile(b.file(prefix, d))
	expect.That(t, err == nil && d.Function().Sum(data) == d,
		"the bucket has no object of blob %s: %d bytes, %v", d, len(data), err)
}

// kindsOfBuckets runs a test in parallel for each kind of bucket.
func kindsOfBuckets(t *testing.T, test func(t *testing.T, b *bucket)) {
	for _, kind := range []string{"plain", "versioned", "locked"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(t, newBucket(t, kind))
		})
	}
}

func TestBucketMeetsTheStoreContract(t *testing.T) {
	kindsOfBuckets(t, func(t *testing.T, b *bucket) {
		n := 0
		fresh := func(t *testing.T) *object.Store {
			n++
			return b.store(t, fmt.Sprint("store", n))
		}
		castest.TestStore(t, func(t *testing.T) cas.Store { return fresh(t) })
		castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return fresh(t) })
	})
}

// TestBucketBlobsAreVerifiedAndReplaced checks damaged and deleted objects, also those that were sent in parts.
func TestBucketBlobsAreVerifiedAndReplaced(t *testing.T) {
	kindsOfBuckets(t, func(t *testing.T, b *bucket) {
		store := b.store(t, "x")
		for i, size := range []int{1000, 20 << 20} {
			data, d := castest.Blob(byte(i), size)
			put := func() { must.Succeed(t, store.Put(t.Context(), d, bytes.NewReader(data))) }
			put()
			f := must.Get(os.OpenFile(b.file("x", d), os.O_WRONLY, 0))(t)
			_, err := f.WriteAt([]byte("damage"), int64(size/2))
			must.Succeed(t, errors.Join(err, f.Close()))
			expect.Error(t, expect.Err(cas.ReadAll(t.Context(), store, d, int64(size))), cas.ErrCorrupt,
				"%d bytes, damaged", size)
			wantMissing(t, store, d, true)
			put()
			wantMissing(t, store, d, false)
			if got, err := cas.ReadAll(t.Context(), store, d, int64(size)); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, put again: got %d bytes, %v", size, len(got), err)
			}
			must.Succeed(t, b.admin.RemoveObject(t.Context(), b.name, strings.TrimPrefix(b.file("x", d), filepath.Join(b.options.Dir, b.name)+"/"), minio.RemoveObjectOptions{}))
			wantMissing(t, store, d, true)
			put()
			wantMissing(t, store, d, false)
			b.wantObject(t, "x", d)
		}
	})
}

func wantMissing(t *testing.T, store cas.Store, d cas.Digest, want bool) {
	t.Helper()
	expect.Equal(t, len(must.Get(store.Missing(t.Context(), []cas.Digest{d}))(t)) == 1, want, "blob %s", d)
}

// TestBucketRenewsObjects checks that an object that expires soon becomes new, by a copy or by another Put. This server
// keeps the age of an object that is copied onto itself, unlike Amazon's.
func TestBucketRenewsObjects(t *testing.T) {
	kindsOfBuckets(t, func(t *testing.T, b *bucket) {
		store := b.store(t, "x")
		expect.Equal(t, store.Lifetime(), 10*24*time.Hour, "lifetime (ten days)")
		for i, size := range []int{1000, 20 << 20} {
			data, d := castest.Blob(byte(i), size)
			must.Succeed(t, store.Put(t.Context(), d, bytes.NewReader(data)))
			age := func() time.Duration {
				return time.Since(must.Get(os.Stat(b.file("x", d)))(t).ModTime())
			}
			for _, days := range []int{4, 6} {
				at := time.Now().Add(-time.Duration(days) * 24 * time.Hour)
				must.Succeed(t, os.Chtimes(b.file("x", d), at, at))
				absent, err := store.Renew(t.Context(), []cas.Digest{d})
				if soon := days > 5; err != nil || len(absent) == 0 && soon && age() > 24*time.Hour || len(absent) > 0 && !soon {
					t.Errorf("%d bytes, %d days: got %v, %v at the age %v", size, days, absent, err, age())
				}
			}
			must.Succeed(t, store.Put(t.Context(), d, bytes.NewReader(data)))
			expect.That(t, age() <= 24*time.Hour, "%d bytes, put again: got age %v", size, age())
			wantMissing(t, store, d, false)
			b.wantObject(t, "x", d)
		}
	})
}

// TestUnreachableBucket kills and freezes the server. Calls fail, then without a request, until it is back.
func TestUnreachableBucket(t *testing.T) {
	for name, stop := range map[string]func(t *testing.T, b *bucket) (back func()){
		"killed": func(t *testing.T, b *bucket) func() {
			b.Kill()
			return func() { b.start(t) }
		},
		"frozen": freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBucket(t, "plain")
			var mu sync.Mutex
			requests := 0
			c := b.open(t, "x", func(_ context.Context, c object.Call) {
				mu.Lock()
				defer mu.Unlock()
				if c.Kind != "probe" {
					requests += c.Requests
				}
			})
			store := must.Get(c.Store(""))(t)
			data, d := castest.Blob(1, 1000)
			must.Succeed(t, store.Put(t.Context(), d, bytes.NewReader(data)))
			back := stop(t, b)
			must.Hold(t, "the bucket is known to be down", func() bool {
				_, err := store.Missing(t.Context(), []cas.Digest{d})
				expect.Error(t, err, cas.ErrUnavailable)
				return c.Err() != nil
			})
			mu.Lock()
			requests = 0
			mu.Unlock()
			for range 100 {
				_, err := store.Missing(t.Context(), []cas.Digest{d})
				if err == nil {
					_, err = cas.ReadAll(t.Context(), store, d, 1000)
				}
				if !errors.Is(err, cas.ErrUnavailable) || !errors.Is(store.Put(t.Context(), d, bytes.NewReader(data)), cas.ErrUnavailable) {
					t.Fatalf("got %v, want ErrUnavailable", err)
				}
			}
			mu.Lock()
			expect.Equal(t, requests, 0, "requests to a bucket that is known to be down")
			mu.Unlock()
			back()
			must.Hold(t, "the bucket is up again", func() bool { return c.Err() == nil })
			wantMissing(t, store, d, false)
		})
	}
}

// TestFullBucket checks that a bucket without space is full, in words that help, and works again when there is room.
func TestFullBucket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{"--mount"}
	if os.Geteuid() != 0 {
		flags = append(flags, "--user", "--map-root-user")
	}
	if out, err := exec.CommandContext(t.Context(), "unshare", append(flags, "mount", "-t", "tmpfs", "none", dir)...).CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("unshare and mount: %v: %s", err, out))
	}
	program, err := programs[peers.VersityGW.Name]()
	if err != nil {
		sandboxtest.Unavailable(t, "interop", err)
	}
	// The mount ends with the server.
	script := filepath.Join(t.TempDir(), "versitygw")
	text := fmt.Sprintf("#!/bin/sh\nexec unshare %s --propagation private -- sh -c 'mount -t tmpfs -o size=20m none %s && exec %s \"$@\"' sh \"$@\"\n",
		strings.Join(flags, " "), dir, program)
	must.Succeed(t, os.WriteFile(script, []byte(text), 0o755))
	s := must.Get(peers.VersityGW.Start(t.Context(), peers.Options{Program: script, Dir: dir}))(t)
	t.Cleanup(func() { must.Succeed(t, s.Stop()) })
	admin, err := minio.New(s.Addr, &minio.Options{Creds: credentials.NewStaticV4(peers.AccessKey, peers.SecretKey, "")})
	must.Succeed(t, err)
	must.Succeed(t, admin.MakeBucket(t.Context(), "full", minio.MakeBucketOptions{}))
	b := &bucket{Server: s, name: "full", admin: admin}
	store := b.store(t, "x")
	small, smallDigest := castest.Blob(1, 8<<20)
	must.Succeed(t, store.Put(t.Context(), smallDigest, bytes.NewReader(small)))
	for i, size := range []int{16 << 20, 40 << 20} { // in one request, and in parts
		large, d := castest.Blob(byte(2+i), size)
		err := store.Put(t.Context(), d, bytes.NewReader(large))
		expect.That(t, errors.Is(err, cas.ErrUpstreamFull) && strings.Contains(err.Error(), "free space in the bucket"),
			"%d bytes: got %v, want ErrUpstreamFull with advice", size, err)
		wantMissing(t, store, d, true)
	}
	wantMissing(t, store, smallDigest, false)
	c := b.open(t, "x", nil) // a full bucket can be opened
	must.Succeed(t, c.Check(t.Context()))
	must.Succeed(t, admin.RemoveObject(t.Context(), "full", "x/!/blobs/sha256/"+strings.ReplaceAll(smallDigest.String(), "/", "-"), minio.RemoveObjectOptions{}))
	must.Succeed(t, store.Put(t.Context(), smallDigest, bytes.NewReader(small)))
}

// TestBucketThatMayOnlyBeRead checks that missing permission is found at the start, names the remedy, and leaves the
// bucket unchanged.
func TestBucketThatMayOnlyBeRead(t *testing.T) {
	t.Parallel()
	b := newBucket(t, "plain")
	data, d := castest.Blob(1, 1000)
	must.Succeed(t, b.store(t, "x").Put(t.Context(), d, bytes.NewReader(data)))
	readOnly := launch(t, peers.VersityGW, peers.Options{Dir: b.options.Dir, ReadOnly: true})
	url := fmt.Sprintf("s3://%s/x?endpoint=http://%s", b.name, readOnly.Addr)
	_, err := object.Open(t.Context(), object.Config{URL: url})
	if !errors.Is(err, cas.ErrDenied) || !strings.Contains(err.Error(), "s3:PutObject") || !strings.Contains(err.Error(), "bucket plain") {
		t.Errorf("got %v, want ErrDenied with the permission and the bucket", err)
	}
	program := must.Get(cloister())(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "serve", "--listen", "127.0.0.1:0", "--dir", t.TempDir(), "--max-size", "1GiB", "--store", url)
	out, err := cmd.CombinedOutput()
	expect.That(t, cmd.ProcessState.ExitCode() > 0 && strings.Contains(string(out), "s3:PutObject"),
		"cloister serve: got %v, %s; want an error with the permission", err, out)
	expect.Slices(t, b.files(t, ""), []string{b.file("x", d)}, "files (only that of the blob)")
}
