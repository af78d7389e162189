// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestDamagedBlobIsNotServedAndCanBePutAgain tries every kind of damage and use. The blob must become absent and be
// reported.
func TestDamagedBlobIsNotServedAndCanBePutAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func([]byte) []byte
	}{
		{"bit flipped", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }},
		{"one byte short", func(b []byte) []byte { return b[:len(b)-1] }},
		{"one byte long", func(b []byte) []byte { return append(b, 0) }},
		{"empty", func(b []byte) []byte { return nil }},
		{"zeros", func(b []byte) []byte { return make([]byte, len(b)) }},
	} {
		for _, u := range uses[:1] {
			t.Run(c.name+" "+u.name, func(t *testing.T) {
				dir := t.TempDir()
				var reported atomic.Int32
				s := store(t, open(t, disk.Config{Dir: dir, Pack: everyFile, Corrupt: func(instance string, d cas.Digest, where string) {
					expect.That(t, instance == "" && filepath.Join(dir, where) == filePath(dir, d),
						"Corrupt: got %q, %s", instance, where)
					reported.Add(1)
				}}), "")
				d := put(t, s, 0)
				damageFile(t, filePath(dir, d), c.change)
				expect.Error(t, expect.Err(cas.ReadAll(t.Context(), s, d, block)), cas.ErrCorrupt)
				expect.That(t, !exists(filePath(dir, d)), "the damaged file still exists")
				expect.That(t, exists(filepath.Join(dir, "quarantine", fmt.Sprintf("%s-%d", d.Hash(), d.Size()))),
					"the blob is not in quarantine")
				expect.That(t, !has(t, s, d), "the damaged blob is still present")
				put(t, s, 0)
				read(t, s, 0, block)
				expect.Equal(t, reported.Load(), 1, "calls of Corrupt")
			})
		}
	}
}

func TestDamagedPackedBlobIsNotServed(t *testing.T) {
	for name, use := range map[string]func(s *disk.Store, d cas.Digest) error{
		"Open": func(s *disk.Store, d cas.Digest) error { _, err := s.Open(t.Context(), d, 0); return err },
		"Open from within": func(s *disk.Store, d cas.Digest) error {
			_, err := s.Open(t.Context(), d, block-1)
			return err
		},
		"File":            func(s *disk.Store, d cas.Digest) error { _, _, err := s.File(t.Context(), d, false); return err },
		"executable File": func(s *disk.Store, d cas.Digest) error { _, _, err := s.File(t.Context(), d, true); return err },
	} {
		for _, cut := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,cut=%v", name, cut), func(t *testing.T) {
				dir := t.TempDir()
				var reported []string
				config := disk.Config{Dir: dir, Corrupt: func(instance string, d cas.Digest, where string) { reported = append(reported, where) }}
				c, s := openStore(t, config)
				kept, d := put(t, s, 1), put(t, s, 0)
				b, _ := castest.Blob(0, block)
				if cut {
					path, at := find(t, dir, b)
					must.Succeed(t, os.Truncate(path, int64(at)+10))
				} else {
					damageBlob(t, dir, b)
				}
				if err := use(s, d); !errors.Is(err, cas.ErrCorrupt) && !errors.Is(err, cas.ErrNotFound) {
					t.Errorf("got %v, want ErrCorrupt or ErrNotFound", err)
				}
				expect.That(t, !has(t, s, d) && has(t, s, kept),
					"the damaged blob is present, or its neighbour is absent")
				if len(reported) != 1 || reported[0] != "segments/00000001.data at 4096" || c.Stats().Corrupt != 1 {
					t.Errorf("Corrupt: got %q, counted %d", reported, c.Stats().Corrupt)
				}
				if got := list(t, filepath.Join(dir, "quarantine")); len(got) != 2 && !cut {
					t.Errorf("quarantine: got %q", got)
				}
				if cut {
					return // no store survives a truncated segment before Open
				}
				// Also after reopening.
				closeStore(t, c)
				c, s = openStore(t, config)
				expect.That(t, !has(t, s, d), "the blob is present again after reopening")
				put(t, s, 0)
				closeStore(t, c)
				read(t, store(t, open(t, config), ""), 0, block)
			})
		}
	}
}

func TestTruncatedBlobIsNotServedFromAnOffset(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir, Pack: everyFile}), "")
	for i, off := range []int64{1, block / 2, block} {
		d := put(t, s, byte(i))
		damageFile(t, filePath(dir, d), func(b []byte) []byte { return b[:block/2] })
		r, err := s.Open(t.Context(), d, off)
		expect.Error(t, err, cas.ErrCorrupt, "Open at %d", off)
		if r != nil {
			r.Close()
		}
	}
	expect.Slices(t, present(t, s, 3), nil, "truncated blobs that are still present")
}

func TestFileOfTruncatedBlobIsNotFound(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir, Pack: everyFile}), "")
	for _, executable := range []bool{false, true} {
		d := put(t, s, 0)
		damageFile(t, filePath(dir, d), func(b []byte) []byte { return b[:10] })
		if path, _, err := s.File(t.Context(), d, executable); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("executable %v: got %q, %v, want ErrNotFound", executable, path, err)
		}
	}
}

// TestDamagedCopyIsReplaced: a copy damaged or removed by another process does not affect the blob.
func TestDamagedCopyIsReplaced(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir}), "")
	b, _ := castest.Blob(0, block)
	d := put(t, s, 0)
	for _, harm := range []func(path string){
		func(path string) { damageFile(t, path, func(b []byte) []byte { return b[:10] }) },
		func(path string) {
			must.Succeed(t, os.Remove(path))
		},
	} {
		path, release := file(t, s, d, true)
		release()
		harm(path)
		path, release = file(t, s, d, true)
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
			t.Errorf("file: got %d bytes, %v", len(got), err)
		}
		release()
	}
}

// TestCopyIsCountedOnce removes a copy that is in use. Check compares the counters.
func TestCopyIsCountedOnce(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir()})
	d := put(t, s, 0)
	path, first := file(t, s, d, true)
	before := c.Stats()
	must.Succeed(t, os.Remove(path))
	_, second := file(t, s, d, true)
	expect.Equal(t, c.Stats(), before, "Stats")
	first()
	second()
	expect.Error(t, c.Check(t.Context()), nil)
}

// TestFileOfEarlierProcessIsVerifiedBeforeUse damages a blob, with its size unchanged, while the store is closed.
func TestFileOfEarlierProcessIsVerifiedBeforeUse(t *testing.T) {
	for _, c := range []struct {
		name string
		use  func(s *disk.Store, d cas.Digest) error
		want error
	}{
		{"Open from within", func(s *disk.Store, d cas.Digest) error {
			_, err := s.Open(t.Context(), d, block-1)
			return err
		}, cas.ErrCorrupt},
		{"File", func(s *disk.Store, d cas.Digest) error { _, _, err := s.File(t.Context(), d, false); return err }, cas.ErrNotFound},
		{"executable File", func(s *disk.Store, d cas.Digest) error { _, _, err := s.File(t.Context(), d, true); return err }, cas.ErrNotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir(), Pack: everyFile}
			earlier := open(t, config)
			d := put(t, store(t, earlier, ""), 0)
			closeStore(t, earlier)
			b, _ := castest.Blob(0, block)
			damageBlob(t, config.Dir, b)

			s := store(t, open(t, config), "")
			expect.Error(t, c.use(s, d), c.want)
			expect.That(t, !has(t, s, d), "the blob is present")
			put(t, s, 0)
			_, release := file(t, s, d, true)
			release()
		})
	}
}

// TestFileIsVerifiedOnce: a verified file is not read again, so that later damage goes unnoticed.
func TestFileIsVerifiedOnce(t *testing.T) {
	use := func(s *disk.Store, d cas.Digest) error {
		_, release, err := s.File(t.Context(), d, false)
		if err == nil {
			release()
		}
		return err
	}
	for name, verify := range map[string]func(*disk.Cache, *disk.Store, cas.Digest) error{
		"by File": func(_ *disk.Cache, s *disk.Store, d cas.Digest) error { return use(s, d) },
		"by a whole read": func(_ *disk.Cache, s *disk.Store, d cas.Digest) error {
			_, err := cas.ReadAll(t.Context(), s, d, block)
			return err
		},
		"by a read from within": func(_ *disk.Cache, s *disk.Store, d cas.Digest) error {
			r, err := s.Open(t.Context(), d, 1)
			if err == nil {
				err = r.Close()
			}
			return err
		},
		"by Verify": func(c *disk.Cache, s *disk.Store, d cas.Digest) error {
			_, err := c.Verify(t.Context(), disk.VerifyOptions{})
			return err
		},
		"by Put": func(_ *disk.Cache, s *disk.Store, d cas.Digest) error { put(t, s, 1); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Pack: everyFile}
			earlier := open(t, config)
			d := put(t, store(t, earlier, ""), 0)
			closeStore(t, earlier)
			c := must.Get(disk.Open(config))(t)
			defer c.Close()
			s := store(t, c, "")
			must.Succeed(t, verify(c, s, d))
			seed := byte(0)
			if name == "by Put" {
				seed = 1
			}
			b, d := castest.Blob(seed, block)
			damageBlob(t, config.Dir, b)
			expect.Error(t, use(s, d), nil, "the file was read again")
		})
	}
}

func TestVerificationEndsWithItsContext(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), Pack: everyFile}
	c := open(t, config)
	d := put(t, store(t, c, ""), 0)
	closeStore(t, c)
	s := store(t, open(t, config), "")
	ctx := &endsAfter{Context: t.Context(), calls: 1}
	if _, _, err := s.File(ctx, d, false); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	expect.That(t, has(t, s, d), "a blob that was read in part is considered damaged")
}

// endsAfter is a context that ends after a number of calls of Err.
type endsAfter struct {
	context.Context
	calls int
}

func (c *endsAfter) Err() error {
	if c.calls--; c.calls < 0 {
		return context.Canceled
	}
	return nil
}

func TestBlobTruncatedDuringRead(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir, Pack: everyFile}), "")
	for _, off := range []int64{0, 1} {
		d := put(t, s, 0)
		r := must.Get(s.Open(t.Context(), d, off))(t)
		damageFile(t, filePath(dir, d), func(b []byte) []byte { return b[:10] })
		expect.Error(t, expect.Err(io.ReadAll(r)), cas.ErrCorrupt, "from %d", off)
		expect.Error(t, r.Close(), nil)
	}
}

func TestVanishedFileIsNotFound(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, Pack: everyFile})
	for i, use := range []func(cas.Digest) error{
		func(d cas.Digest) error { _, err := s.Open(t.Context(), d, 0); return err },
		func(d cas.Digest) error { _, _, err := s.File(t.Context(), d, false); return err },
		func(d cas.Digest) error { _, _, err := s.File(t.Context(), d, true); return err },
	} {
		d := put(t, s, byte(i))
		must.Succeed(t, os.Remove(filePath(dir, d)))
		expect.Error(t, use(d), cas.ErrNotFound, "use %d", i)
	}
	expect.Slices(t, present(t, s, 3), nil, "vanished blobs that are still present")
	expect.Equal(t, c.Stats().Corrupt, 3, "damaged blobs")
}

func TestDamagedResultIsMiss(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, MaxBytes: 16 << 20})
	_, action := castest.Blob(0, 10)
	out, _ := castest.Blob(1, 20)
	const sum = 32 // length of the checksum before the message
	record := func() (path string, at, size int) {
		t.Helper()
		out[0], out[1] = out[0]+1, ^out[0] // unique in the segment
		must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: 3, StdoutRaw: out}))
		path, in := find(t, dir, out)
		return path, in / 512 * 512, in%512 + len(out)
	}
	_, _, size := record()
	must.Be(t, size >= sum+len(out), "got a result of %d bytes", size)
	for i := range size {
		path, at, _ := record()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must.Succeed(t, err)
		b := make([]byte, 1)
		_, err = f.ReadAt(b, int64(at+i))
		if err == nil {
			_, err = f.WriteAt([]byte{b[0] ^ 0x10}, int64(at+i))
		}
		must.Succeed(t, errors.Join(err, f.Close()))
		expect.Error(t, expect.Err(s.Lookup(t.Context(), action)), cas.ErrNotFound, "byte %d flipped", i)
	}
	if got := c.Stats(); got.Corrupt != int64(size) || got.Results != 0 {
		t.Errorf("Stats after flipping %d bytes: got %+v", size, got)
	}
}

// TestQuarantineIsBounded: damage must not fill a store.
func TestQuarantineIsBounded(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		const budget = 2 << 20
		dir := t.TempDir()
		_, s := openStore(t, disk.Config{Dir: dir, MaxBytes: budget, Pack: pack, Lease: none})
		for i := range byte(150) {
			d := putSize(t, s, i, 3*block)
			b, _ := castest.Blob(i, 3*block)
			damageBlob(t, dir, b)
			if _, err := cas.ReadAll(t.Context(), s, d, d.Size()); !errors.Is(err, cas.ErrCorrupt) {
				t.Fatalf("got %v, want ErrCorrupt", err)
			}
		}
		var size int64
		for _, name := range list(t, filepath.Join(dir, "quarantine")) {
			fi := must.Get(os.Stat(filepath.Join(dir, "quarantine", name)))(t)
			if fi.Mode().IsRegular() {
				size += fi.Size()
			}
		}
		expect.That(t, size != 0 && size <= budget/64,
			"pack %d: quarantine has %d bytes, budget %d", pack, size, budget)
	}
}

func TestQuarantineIsBoundedInFiles(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		const files = 640
		dir := t.TempDir()
		s := store(t, open(t, disk.Config{Dir: dir, MaxBytes: 64 << 20, MaxFiles: files, Pack: pack}), "")
		for i := range byte(20) {
			d := putSize(t, s, i, 1000)
			b, _ := castest.Blob(i, 1000)
			damageBlob(t, dir, b)
			if _, err := cas.ReadAll(t.Context(), s, d, d.Size()); !errors.Is(err, cas.ErrCorrupt) {
				t.Fatalf("got %v, want ErrCorrupt", err)
			}
		}
		if n := len(list(t, filepath.Join(dir, "quarantine"))) - 1; n == 0 || n > files/64 {
			t.Errorf("pack %d: quarantine has %d files, budget %d", pack, n, files)
		}
	}
}

func TestCheckFindsInconsistencies(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(t *testing.T, dir string, d cas.Digest)
		want string
	}{
		{"damaged file", func(t *testing.T, dir string, d cas.Digest) {
			damageFile(t, filePath(dir, d), func(b []byte) []byte { b[0] ^= 1; return b })
		}, "corrupt"},
		{"vanished file", func(t *testing.T, dir string, d cas.Digest) {
			must.Succeed(t, os.Remove(filePath(dir, d)))
		}, "no such file"},
		{"damaged blob", func(t *testing.T, dir string, d cas.Digest) {
			b, _ := castest.Blob(1, 1000)
			damageBlob(t, dir, b)
		}, "does not match the digest"},
		{"lost record", func(t *testing.T, dir string, d cas.Digest) {
			must.Succeed(t, os.Truncate(segmentFiles(t, dir, ".log")[0], 64))
		}, "no record"},
		{"foreign file", func(t *testing.T, dir string, d cas.Digest) {
			write(t, filepath.Join(filepath.Dir(filePath(dir, d)), "letter.txt"), "")
		}, "letter.txt"},
		{"unindexed file", func(t *testing.T, dir string, d cas.Digest) { write(t, filePath(dir, d)+"0", "") }, "not in the index"},
		{"unfinished file", func(t *testing.T, dir string, d cas.Digest) { write(t, filepath.Join(dir, "tmp", "x"), "") }, "unfinished"},
		{"uncounted file", func(t *testing.T, dir string, d cas.Digest) {
			write(t, filepath.Join(dir, "quarantine", "x"), "")
		}, "counted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			cache := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20}))(t)
			defer cache.Close()
			d := putSize(t, store(t, cache, ""), 0, 70_000)
			putSize(t, store(t, cache, ""), 1, 1000)
			expect.Error(t, cache.Check(t.Context()), nil, "before the change")
			c.do(t, dir, d)
			expect.Message(t, cache.Check(t.Context()), c.want)
		})
	}
}

// TestVerifyFindsDamage: each kind of damage is found, reported once and dropped.
func TestVerifyFindsDamage(t *testing.T) {
	dir := t.TempDir()
	reported := map[string]int{}
	c := open(t, disk.Config{Dir: dir, MaxBytes: 4 << 20, Corrupt: func(instance string, d cas.Digest, where string) {
		reported[instance+" "+d.String()]++
	}})
	s := store(t, c, "")
	blobs := map[string]cas.Digest{
		"packed": putSize(t, s, 0, 1000), "flipped": putSize(t, s, 1, 70_000), "cut": putSize(t, s, 2, 70_000),
		"vanished": putSize(t, s, 3, 70_000),
	}
	for i := byte(10); i < 30; i++ {
		putSize(t, s, i, 5000*int(i-9))
	}
	other := store(t, c, "other")
	otherDigest := putSize(t, other, 4, 1000)
	_, action := castest.Blob(5, 10)
	out, _ := castest.Blob(6, 100)
	must.Succeed(t, other.Record(t.Context(), action, &repb.ActionResult{StdoutRaw: out}))
	flip := func(seed byte, size int) { b, _ := castest.Blob(seed, size); damageBlob(t, dir, b) }
	flip(0, 1000)
	flip(1, 70_000)
	damageFile(t, filePath(dir, blobs["cut"]), func(b []byte) []byte { return b[:100] })
	must.Succeed(t, os.Remove(filePath(dir, blobs["vanished"])))
	flip(4, 1000)
	flip(6, 100)

	want := map[string]string{
		" " + blobs["packed"].String():   "segments/0000000",
		" " + blobs["flipped"].String():  filePath("", blobs["flipped"]),
		" " + blobs["cut"].String():      filePath("", blobs["cut"]),
		" " + blobs["vanished"].String(): filePath("", blobs["vanished"]),
		"other " + otherDigest.String():  "segments/0000000", "other " + action.String(): "segments/0000000",
	}
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	must.Succeed(t, err)
	for _, d := range r.Damaged {
		name := d.Instance + " " + d.Digest.String()
		if where, ok := want[name]; !ok || !strings.HasPrefix(d.Where, where) {
			t.Errorf("got damage %+v, want it at %q", d, where)
		}
		expect.That(t, reported[name] == 1, "Corrupt was called %d times for %s, want 1", reported[name], name)
		delete(want, name)
	}
	expect.That(t, len(want) == 0 && len(reported) == 6 && c.Stats().Corrupt == 6,
		"not found: %v; calls of Corrupt: %d, counted %d", want, len(reported), c.Stats().Corrupt)
	expect.That(t, r.Blobs == 26 && !r.Resumed && r.TotalBytes >= 1_000_000 && r.Bytes <= r.TotalBytes,
		"Verify: got %+v", r)
	for name, d := range blobs {
		expect.That(t, !has(t, s, d), "%s is still present", name)
	}
	expect.That(t, !has(t, other, otherDigest), "the damaged blob of the other instance is still present")
	expect.Error(t, expect.Err(other.Lookup(t.Context(), action)), cas.ErrNotFound, "damaged result")
	if got := list(t, filepath.Join(dir, "quarantine")); len(got) < 4 {
		t.Errorf("quarantine: got %q", got)
	}
	r, err = c.Verify(t.Context(), disk.VerifyOptions{})
	expect.That(t, err == nil && len(r.Damaged) == 0 && r.Blobs == 20, "second Verify: got %+v, %v", r, err)
}

// TestWaitingVerifyEndsWithItsContext: a Verify that waits for another one does not outlast its context.
func TestWaitingVerifyEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := openStore(t, disk.Config{Dir: t.TempDir()})
		putSize(t, s, 0, 1000)
		putSize(t, s, 1, 1000)
		first, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c.Verify(first, disk.VerifyOptions{BytesPerSecond: 1})
		}()
		synctest.Wait() // the first Verify has read one blob
		began := time.Now()
		second, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := c.Verify(second, disk.VerifyOptions{}); !errors.Is(err, context.DeadlineExceeded) ||
			time.Since(began) != time.Minute {
			t.Errorf("second Verify, after %v: got %v", time.Since(began), err)
		}
		stop()
		<-ended
		if r, err := c.Verify(t.Context(), disk.VerifyOptions{}); err != nil || !r.Resumed {
			t.Errorf("third Verify: got %+v, %v", r, err)
		}
	})
}

// TestVerifyResumes in the same or the next process and reads nothing twice.
func TestVerifyResumes(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		for _, reopen := range []bool{false, true} {
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Pack: pack}
			c, s := openStore(t, config)
			const blobs = 60
			for i := range byte(blobs) {
				putSize(t, s, i, 3000)
			}
			stopped, err := c.Verify(&endsAfter{Context: t.Context(), calls: 40}, disk.VerifyOptions{})
			must.Be(t, errors.Is(err, context.Canceled) && stopped.Blobs != 0 && stopped.Blobs != blobs,
				"got %+v, %v, want it to stop", stopped, err)
			if reopen {
				closeStore(t, c)
				c = open(t, config)
			}
			// A blob that was read is not read again, so this damage is not found.
			b, _ := castest.Blob(0, 3000)
			damageBlob(t, config.Dir, b)
			rest, err := c.Verify(t.Context(), disk.VerifyOptions{})
			if err != nil || !rest.Resumed || rest.Blobs+stopped.Blobs != blobs || len(rest.Damaged) > 0 ||
				rest.TotalBytes > 3000*rest.Blobs {
				t.Errorf("stopped after %+v; then got %+v, %v", stopped, rest, err)
			}
			// From the beginning, and again with Restart.
			expect.Error(t, expect.Err(c.Verify(&endsAfter{Context: t.Context(), calls: 40}, disk.VerifyOptions{Restart: true})),
				context.Canceled)
			all, err := c.Verify(t.Context(), disk.VerifyOptions{Restart: true})
			if err != nil || all.Resumed || all.Blobs != blobs-1 || exists(filepath.Join(config.Dir, "verify")) {
				t.Errorf("from the beginning: got %+v, %v", all, err)
			}
		}
	}
}

// TestVerifyResumesAtReplacedResult: Verify reads the later result at its position, and neither stops nor skips.
func TestVerifyResumesAtReplacedResult(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir()})
	const blobs = 9
	_, action := castest.Blob(0, 10)
	for n := range int32(2) {
		must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: n}))
		for i := byte(0); n == 0 && i < blobs; i++ {
			putSize(t, s, i, 100)
		}
	}
	all, err := c.Verify(t.Context(), disk.VerifyOptions{})
	expect.That(t, err == nil && all.Blobs == blobs+1, "%d entries: got %+v, %v", blobs+1, all, err)
	for calls := range 4 {
		stopped, err := c.Verify(&endsAfter{t.Context(), calls}, disk.VerifyOptions{Restart: true})
		expect.That(t, errors.Is(err, context.Canceled), "got %+v, %v, want it to stop", stopped, err)
		rest, err := c.Verify(t.Context(), disk.VerifyOptions{})
		expect.That(t, err == nil && stopped.Blobs+rest.Blobs == all.Blobs,
			"stopped after %d, then got %d, want %d in total: %v", stopped.Blobs, rest.Blobs, all.Blobs, err)
	}
}

// TestVerifyEndsUnderLoad puts data faster than Verify may read it.
func TestVerifyEndsUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := openStore(t, disk.Config{Dir: t.TempDir(), Lease: none})
		n := 0
		putNext := func() {
			n++
			b := bytes.Repeat([]byte(fmt.Sprintf("%04d", n)), 1000)
			must.Succeed(t, s.Put(t.Context(), cas.SHA256.Sum(b), bytes.NewReader(b)))
		}
		for range 20 {
			putNext()
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() {
			_, err := c.Verify(ctx, disk.VerifyOptions{BytesPerSecond: 20_000})
			done <- err
		}()
		for range 500 {
			putNext()
			time.Sleep(100 * time.Millisecond) // 40,000 bytes per second
			select {
			case err := <-done:
				expect.Error(t, err, nil)
				return
			default:
			}
		}
		t.Errorf("Verify has not ended after %d puts, 20 of them before it began", n)
		cancel()
		<-done
	})
}

func TestVerifyKeepsItsRate(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		synctest.Test(t, func(t *testing.T) {
			c, s := openStore(t, disk.Config{Dir: t.TempDir(), Pack: pack})
			for i := range byte(100) {
				putSize(t, s, i, 1000)
			}
			before := time.Now()
			var reported int
			r, err := c.Verify(t.Context(), disk.VerifyOptions{BytesPerSecond: 10_000, Progress: func(disk.VerifyReport) { reported++ }})
			// The last blob is read without waiting.
			if took := time.Since(before); err != nil || took < 9900*time.Millisecond || took > 10*time.Second ||
				reported < 9 || reported > 12 {
				t.Errorf("100000 bytes at 10000 per second took %v with %d reports: %+v, %v", took, reported, r, err)
			}
			// Close interrupts Verify.
			done := make(chan error)
			go func() {
				_, err := c.Verify(t.Context(), disk.VerifyOptions{BytesPerSecond: 1})
				done <- err
			}()
			time.Sleep(time.Second)
			before = time.Now()
			expect.Error(t, c.Close(), nil)
			if err := <-done; !errors.Is(err, os.ErrClosed) || time.Since(before) > time.Second {
				t.Errorf("Verify of a closed store: got %v after %v", err, time.Since(before))
			}
		})
	}
}

// TestDamageOfEveryFunction: blobs of every digest function survive reopening and become absent when damaged, until
// they are put again. For hashes longer than 32 bytes the reported digest is zero.
func TestDamageOfEveryFunction(t *testing.T) {
	for _, f := range cas.Functions() {
		t.Run(f.String(), func(t *testing.T) {
			dir := t.TempDir()
			c := open(t, disk.Config{Dir: dir, MaxBytes: 4 << 20})
			small, large := []byte("a small blob of its own"), bytes.Repeat([]byte("a large one"), 10_000)
			ds := []cas.Digest{f.Sum(small), f.Sum(large)}
			put := func(c *disk.Cache) *disk.Store {
				s := store(t, c, "main")
				for i, b := range [][]byte{small, large} {
					must.Succeed(t, s.Put(t.Context(), ds[i], bytes.NewReader(b)))
				}
				return s
			}
			put(c)
			closeStore(t, c)
			c = open(t, disk.Config{Dir: dir, MaxBytes: 4 << 20})
			s := store(t, c, "main")
			if r, err := c.Verify(t.Context(), disk.VerifyOptions{}); err != nil || r.Blobs != 2 ||
				len(r.Damaged) > 0 || len(missing(t, s, ds...)) > 0 {
				t.Fatalf("after reopening: got %+v, %v", r, err)
			}
			damageBlob(t, dir, small)
			files, err := filepath.Glob(filepath.Join(dir, "files", "*", f.String(), "*", "*"))
			must.Be(t, err == nil && len(files) == 1, "files: got %q, %v", files, err)
			damageFile(t, files[0], func(b []byte) []byte { b[77] ^= 1; return b })
			r, err := c.Verify(t.Context(), disk.VerifyOptions{})
			must.Be(t, err == nil && len(r.Damaged) == 2 && len(missing(t, s, ds...)) == 2,
				"after damage: got %+v, %v", r, err)
			for _, d := range r.Damaged {
				if known := slices.Contains(ds, d.Digest); known != (f.Size() <= 32) || !known && !d.Digest.IsZero() {
					t.Errorf("got damage %v", d)
				}
			}
			if s = put(c); len(missing(t, s, ds...)) > 0 {
				t.Error("the blob is absent after Put")
			}
		})
	}
}
