// SPDX-License-Identifier: Apache-2.0

package diskctl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// stored opens a store in dir, of which nothing is leased, with some small blobs and a large one.
func stored(t *testing.T, dir string) (*disk.Cache, []cas.Digest) {
	t.Helper()
	c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20, Lease: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	in, err := c.Instance("main")
	if err != nil {
		t.Fatal(err)
	}
	var ds []cas.Digest
	for i := range 20 {
		data := bytes.Repeat([]byte{byte(i)}, 1000)
		if i == 0 {
			data = bytes.Repeat([]byte("large"), 100_000)
		}
		d := cas.SHA256.Sum(data)
		if err := in.Store.Put(t.Context(), d, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		ds = append(ds, d)
	}
	return c, ds
}

// damage changes a byte of the large blob.
func damage(t *testing.T, dir string, d cas.Digest) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "files", "*", "*", "*", fmt.Sprintf("%s-%d", d.Hash(), d.Size())))
	if err != nil || len(paths) != 1 {
		t.Fatalf("files of %s: %q, %v", d, paths, err)
	}
	if err := os.Chmod(paths[0], 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(paths[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("X"), 4321); err != nil {
		t.Fatal(err)
	}
}

func client(t *testing.T, dir string) *diskctl.Client {
	t.Helper()
	c, err := diskctl.Open(t.Context(), dir, -1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func serve(t *testing.T, dir string, c *disk.Cache) *diskctl.Server {
	t.Helper()
	s, err := diskctl.Serve(dir, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// TestSameAnswersWhoeverHolds: the process that serves the store, or this one.
func TestSameAnswersWhoeverHolds(t *testing.T) {
	type answers struct {
		stats           disk.Stats
		could, did      disk.CollectReport
		verified, again disk.VerifyReport
	}
	var got [2]answers
	for i, held := range []bool{true, false} {
		dir := filepath.Join(t.TempDir(), "store")
		cache, ds := stored(t, dir)
		damage(t, dir, ds[0])
		if held {
			serve(t, dir, cache)
		} else if err := cache.Close(); err != nil {
			t.Fatal(err)
		}
		c := client(t, dir)
		if want := map[bool]int{true: os.Getpid()}[held]; c.Holder() != want {
			t.Errorf("held %v: the holder is %d, want %d", held, c.Holder(), want)
		}
		a := &got[i]
		var errs [5]error
		a.stats, errs[0] = c.Stats(t.Context())
		a.verified, errs[1] = c.Verify(t.Context(), disk.VerifyOptions{Progress: func(disk.VerifyReport) {}})
		a.again, errs[2] = c.Verify(t.Context(), disk.VerifyOptions{})
		// The newest second is not older than one.
		old := disk.CollectOptions{OlderThan: time.Second, DryRun: true}
		for a.could.Freed < 19*1024 && t.Context().Err() == nil && errs[3] == nil {
			time.Sleep(100 * time.Millisecond)
			a.could, errs[3] = c.Collect(t.Context(), old)
		}
		old.DryRun = false
		a.did, errs[4] = c.Collect(t.Context(), old)
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatalf("held %v: %v", held, err)
		}
		if len(a.verified.Damaged) != 1 || a.verified.Damaged[0].Digest != ds[0] || a.verified.Damaged[0].Instance != "main" ||
			!strings.HasPrefix(a.verified.Damaged[0].Where, "files/@main/sha256/") || a.verified.Blobs != 20 {
			t.Errorf("held %v: Verify: %+v", held, a.verified)
		}
		kept, err := os.ReadFile(diskctl.Quarantine(dir, ds[0]))
		if err != nil || len(kept) != 500_000 || kept[4321] != 'X' {
			t.Errorf("held %v: %d bytes are in quarantine, %v", held, len(kept), err)
		}
		if diskctl.Quarantine(dir, ds[1]) != "" {
			t.Errorf("held %v: a sound blob is in quarantine", held)
		}
		if a.did.Blobs != 19 || a.did.Segments < 1 || a.did.Freed <= 0 || len(a.did.Ages) < 4 {
			t.Errorf("held %v: Collect: %+v", held, a.did)
		}
		// What the two cannot have in common: the budgets, and what closing has written.
		for _, r := range []*disk.CollectReport{&a.could, &a.did} {
			r.MaxBytes, r.Bytes, r.Freed = 0, 0, 0
		}
		a.stats.MaxBytes, a.stats.MaxFiles, a.stats.Bytes = 0, 0, 0
	}
	if !reflect.DeepEqual(got[0], got[1]) {
		t.Errorf("the holder says\n%+v\nand who opens the store\n%+v", got[0], got[1])
	}
}

// TestDamageIsNamedOnce, by an answer on the way, and not by the last one again.
func TestDamageIsNamedOnce(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	cache, ds := stored(t, dir)
	damage(t, dir, ds[0])
	serve(t, dir, cache)
	onTheWay := 0
	r, err := client(t, dir).Verify(t.Context(), disk.VerifyOptions{
		BytesPerSecond: ds[0].Size() / 2, // so that there is an answer behind it
		Progress:       func(r disk.VerifyReport) { onTheWay = max(onTheWay, len(r.Damaged)) },
	})
	if err != nil || onTheWay != 1 || len(r.Damaged) != 1 {
		t.Errorf("%d damaged on the way, and at the end %+v, %v", onTheWay, r, err)
	}
}

// TestErrorsOfTheHolderArrive in its own words.
func TestErrorsOfTheHolderArrive(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, _ := stored(t, dir)
	s := serve(t, dir, cache)
	c := client(t, dir)
	if _, err := c.Collect(t.Context(), disk.CollectOptions{}); err == nil || !strings.Contains(err.Error(), "neither a size nor an age") {
		t.Errorf("Collect without an aim: %v", err)
	}
	s.Close()
	if _, err := c.Stats(t.Context()); !errors.Is(err, cas.ErrUnavailable) {
		t.Errorf("Stats when the holder has gone: %v", err)
	}
}

// TestSocket is reached in a directory with a long name, by this user alone, and where a killed process left one.
func TestSocket(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 50), "store")
	cache, _ := stored(t, dir)
	if _, err := os.Lstat(filepath.Join(dir, "control")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("there is a socket before Serve: %v", err)
	}
	// As a process leaves it that is killed.
	t.Chdir(dir)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "control", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()

	s := serve(t, dir, cache)
	// Whatever descriptor dir was reached by, it is one of these by now.
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		d, err := os.Open(other)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
	}
	if fi, err := os.Lstat(filepath.Join(dir, "control")); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v", fi, err)
	}
	if c := client(t, dir); c.Holder() == 0 {
		t.Error("the holder was not asked")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(other, "control")); err != nil {
		t.Errorf("Close removes what it did not make: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "control")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Close leaves the socket: %v", err)
	}

	// And nobody is behind it.
	if l, err = net.ListenUnix("unix", &net.UnixAddr{Name: "control", Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	cache.Close()
	if c := client(t, dir); c.Holder() != 0 {
		t.Errorf("process %d was asked behind a socket without one", c.Holder())
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	empty := t.TempDir()
	for _, dir := range []string{empty, filepath.Join(empty, "absent")} {
		if c, err := diskctl.Open(t.Context(), dir, 0); !errors.Is(err, diskctl.ErrNoStore) {
			t.Errorf("%s: %v, %v", dir, c, err)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("Open left %v, %v", left, err)
	}
	// A holder that answers nobody.
	dir := filepath.Join(t.TempDir(), "store")
	stored(t, dir)
	if c, err := diskctl.Open(t.Context(), dir, 0); !errors.Is(err, disk.ErrLocked) || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) {
		t.Errorf("a holder without a socket: %v, %v", c, err)
	}
}

// TestOpenWaitsForAHolderThatEnds between its socket's end and its own.
func TestOpenWaitsForAHolderThatEnds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, _ := stored(t, dir)
	time.AfterFunc(300*time.Millisecond, func() { cache.Close() })
	if c := client(t, dir); c.Holder() != 0 {
		t.Errorf("process %d was asked", c.Holder())
	}
}

// TestOpenGivesUp where the holder takes the connection and answers nothing, as one that was stopped.
func TestOpenGivesUp(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	stored(t, dir)
	behind(t, dir, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if c, err := diskctl.Open(ctx, dir, 0); !errors.Is(err, disk.ErrLocked) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("%v, %v", c, err)
	}
}

// behind lets s answer on the socket of dir, or nobody, though it can be reached.
func behind(t *testing.T, dir string, s cloisterpb.StoreServer) {
	t.Helper()
	// A short path: an address has 108 bytes.
	short := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", short)
	if err == nil {
		err = os.Rename(short, filepath.Join(dir, "control"))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if s != nil {
		server := grpc.NewServer()
		cloisterpb.RegisterStoreServer(server, s)
		go server.Serve(l)
		t.Cleanup(server.Stop)
	}
}

// A hostile holder says what a terminal would obey.
type hostile struct {
	cloisterpb.UnimplementedStoreServer
}

const escape = "\x1b]0;owned\a\r\u009b2J\u202e"

func (hostile) Stat(context.Context, *cloisterpb.StatRequest) (*cloisterpb.StatResponse, error) {
	return &cloisterpb.StatResponse{}, nil
}

func (hostile) Collect(_ context.Context, r *cloisterpb.CollectRequest) (*cloisterpb.CollectResponse, error) {
	if !r.DryRun {
		return nil, status.Error(codes.Internal, "no"+escape)
	}
	return &cloisterpb.CollectResponse{Ages: []*cloisterpb.Age{{Label: "used" + escape}}}, nil
}

func (hostile) Verify(_ *cloisterpb.VerifyRequest, stream grpc.ServerStreamingServer[cloisterpb.VerifyResponse]) error {
	return stream.Send(&cloisterpb.VerifyResponse{Done: true, Damaged: []*cloisterpb.Damage{
		{Digest: cas.SHA256.Sum(nil).String(), Where: "files" + escape},
	}})
}

// TestNothingThatATerminalObeys comes from the process that was asked.
func TestNothingThatATerminalObeys(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	stored(t, dir)
	behind(t, dir, hostile{})
	c := client(t, dir)
	for name, said := range map[string]func() (string, error){
		"age": func() (string, error) {
			r, err := c.Collect(t.Context(), disk.CollectOptions{DryRun: true})
			return r.Ages[0].Label, err
		},
		"error": func() (string, error) {
			_, err := c.Collect(t.Context(), disk.CollectOptions{})
			return err.Error(), nil
		},
		"place": func() (string, error) {
			r, err := c.Verify(t.Context(), disk.VerifyOptions{})
			return r.Damaged[0].Where, err
		},
	} {
		text, err := said()
		if err != nil || !strings.HasSuffix(text, "?]0;owned???2J?") {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
}

// slow reads a store so slowly that it does not come to its end in a test.
const slow = 100

// TestInterruptedVerifyGoesOn where it was, also over the socket.
func TestInterruptedVerifyGoesOn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, ds := stored(t, dir)
	serve(t, dir, cache)
	c := client(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		// Once it has begun: the large blob, which is the first, is behind it.
		for ctx.Err() == nil && cache.Stats().Corrupt == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
	}()
	damage(t, dir, ds[0])
	if _, err := c.Verify(ctx, disk.VerifyOptions{BytesPerSecond: slow}); !errors.Is(err, context.Canceled) {
		t.Fatalf("an interrupted Verify: %v", err)
	}
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	if err != nil || !r.Resumed || r.Blobs == 0 || r.Blobs > 19 || len(r.Damaged) > 0 {
		t.Errorf("the next Verify: %+v, %v", r, err)
	}
	if r, err = c.Verify(t.Context(), disk.VerifyOptions{}); err != nil || r.Resumed || r.Blobs != 19 {
		t.Errorf("the one after it: %+v, %v", r, err)
	}
}

// TestScrubGivesWay to an operator, and ends with its context.
func TestScrubGivesWay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, ds := stored(t, dir)
	damage(t, dir, ds[0])
	s := serve(t, dir, cache)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		s.Scrub(ctx, slow, slog.New(slog.NewTextHandler(io.Discard, nil)))
		close(ended)
	}()
	defer func() { cancel(); <-ended }()
	for cache.Stats().Corrupt == 0 {
		if t.Context().Err() != nil {
			t.Fatal("the scrub does not begin")
		}
		time.Sleep(10 * time.Millisecond)
	}
	bounded, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	r, err := client(t, dir).Verify(bounded, disk.VerifyOptions{})
	if err != nil || !r.Resumed || r.Blobs > 19 {
		t.Errorf("Verify beside a scrub: %+v, %v", r, err)
	}
}
