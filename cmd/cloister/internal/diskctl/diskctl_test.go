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
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// openStore creates a store in dir without leases, with a large blob and 19 small ones.
func openStore(t *testing.T, dir string) (*disk.Cache, []cas.Digest) {
	t.Helper()
	c := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20, Lease: -1}))(t)
	t.Cleanup(func() { c.Close() })
	in := must.Get(c.Instance("main"))(t)
	var ds []cas.Digest
	for i := range 20 {
		data := bytes.Repeat([]byte{byte(i)}, 1000)
		if i == 0 {
			data = bytes.Repeat([]byte("large"), 100_000)
		}
		d := cas.SHA256.Sum(data)
		must.Succeed(t, in.Store.Put(t.Context(), d, bytes.NewReader(data)))
		ds = append(ds, d)
	}
	return c, ds
}

// damage changes a byte of the large blob.
func damage(t *testing.T, dir string, d cas.Digest) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "files", "*", "*", "*", fmt.Sprintf("%s-%d", d.Hash(), d.Size())))
	must.Be(t, err == nil && len(paths) == 1, "files of %s: %q, %v", d, paths, err)
	must.Succeed(t, os.Chmod(paths[0], 0o600))
	f := must.Get(os.OpenFile(paths[0], os.O_WRONLY, 0))(t)
	defer f.Close()
	must.Get(f.WriteAt([]byte("X"), 4321))(t)
}

func client(t *testing.T, dir string) *diskctl.Client {
	t.Helper()
	c := must.Get(diskctl.Open(t.Context(), dir, -1))(t)
	t.Cleanup(func() { c.Close() })
	return c
}

func serve(t *testing.T, dir string, c *disk.Cache) *diskctl.Server {
	t.Helper()
	s := must.Get(diskctl.Serve(dir, c, nil))(t)
	t.Cleanup(func() { s.Close() })
	return s
}

// TestClientIsTheSameWithoutServer compares a store that another process has open with one that the client opens.
func TestClientIsTheSameWithoutServer(t *testing.T) {
	type reports struct {
		stats           disk.Stats
		dryRun, collect disk.CollectReport
		verify, again   disk.VerifyReport
	}
	var got [2]reports
	for i, served := range []bool{true, false} {
		dir := filepath.Join(t.TempDir(), "store")
		cache, ds := openStore(t, dir)
		damage(t, dir, ds[0])
		if served {
			serve(t, dir, cache)
		} else if err := cache.Close(); err != nil {
			t.Fatal(err)
		}
		c := client(t, dir)
		expect.Equal(t, c.Holder(), map[bool]int{true: os.Getpid()}[served], "served %v: Holder", served)
		a := &got[i]
		var errs [5]error
		a.stats, errs[0] = c.Stats(t.Context())
		a.verify, errs[1] = c.Verify(t.Context(), disk.VerifyOptions{Progress: func(disk.VerifyReport) {}})
		a.again, errs[2] = c.Verify(t.Context(), disk.VerifyOptions{})
		// Entries of the current second are not old enough.
		old := disk.CollectOptions{OlderThan: time.Second, DryRun: true}
		for a.dryRun.Freed < 19*1024 && t.Context().Err() == nil && errs[3] == nil {
			time.Sleep(100 * time.Millisecond)
			a.dryRun, errs[3] = c.Collect(t.Context(), old)
		}
		old.DryRun = false
		a.collect, errs[4] = c.Collect(t.Context(), old)
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatalf("served %v: %v", served, err)
		}
		if len(a.verify.Damaged) != 1 || a.verify.Damaged[0].Digest != ds[0] || a.verify.Damaged[0].Instance != "main" ||
			!strings.HasPrefix(a.verify.Damaged[0].Where, "files/@main/sha256/") || a.verify.Blobs != 20 {
			t.Errorf("served %v: Verify: got %+v, want 20 blobs, damage in %s of main", served, a.verify, ds[0])
		}
		kept, err := os.ReadFile(diskctl.Quarantine(dir, ds[0]))
		expect.That(t, err == nil && len(kept) == 500_000 && kept[4321] == 'X',
			"served %v: quarantine: got %d bytes, %v, want the 500000 damaged ones", served, len(kept), err)
		expect.Equal(t, diskctl.Quarantine(dir, ds[1]), "", "served %v: a sound blob", served)
		if a.collect.Blobs != 19 || a.collect.Segments < 1 || a.collect.Freed <= 0 || len(a.collect.Ages) < 4 {
			t.Errorf("served %v: Collect: got %+v, want 19 blobs and a segment removed", served, a.collect)
		}
		// The budgets differ, and so do the sizes: closing writes to the store.
		for _, r := range []*disk.CollectReport{&a.dryRun, &a.collect} {
			r.MaxBytes, r.Bytes, r.Freed = 0, 0, 0
		}
		a.stats.MaxBytes, a.stats.MaxFiles, a.stats.Bytes = 0, 0, 0
	}
	expect.That(t, reflect.DeepEqual(got[0], got[1]), "through the server: got\n%+v\nwithout:\n%+v", got[0], got[1])
}

// TestOneVerifies: a slow Verify does not make others wait without an answer.
func TestOneVerifies(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, _ := openStore(t, dir)
	serve(t, dir, cache)
	slow, interrupt := context.WithCancel(t.Context())
	began, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	go func() {
		defer close(ended)
		_, _ = client(t, dir).Verify(slow, disk.VerifyOptions{BytesPerSecond: 1, Progress: func(disk.VerifyReport) { once.Do(func() { close(began) }) }})
	}()
	<-began
	c := client(t, dir)
	restore := diskctl.SetPatience(time.Millisecond)
	expect.Message(t, expect.Err(c.Verify(t.Context(), disk.VerifyOptions{})), "another cas verify",
		"a second Verify (a refusal)")
	restore()
	interrupt()
	<-ended
	expect.Error(t, expect.Err(c.Verify(t.Context(), disk.VerifyOptions{})), nil, "after the first")
}

// TestVerifyReportsDamageOnce: the last response does not repeat earlier ones.
func TestVerifyReportsDamageOnce(t *testing.T) {
	early := 0
	for seconds := int64(2); early == 0; seconds *= 3 {
		dir := filepath.Join(t.TempDir(), "store")
		cache, ds := openStore(t, dir)
		damage(t, dir, ds[0])
		serve(t, dir, cache)
		r, err := client(t, dir).Verify(t.Context(), disk.VerifyOptions{
			BytesPerSecond: ds[0].Size() / seconds, // so that Progress is called after it, unless the machine stalls for longer
			Progress:       func(r disk.VerifyReport) { early = max(early, len(r.Damaged)) },
		})
		if err != nil || early == 0 && seconds > 50 || early > 1 || len(r.Damaged) != 1 {
			t.Fatalf("got %d damaged blobs in Progress and %+v, %v at the end, want 1 and 1", early, r, err)
		}
	}
}

func TestClientReturnsErrorsOfServer(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, _ := openStore(t, dir)
	s := serve(t, dir, cache)
	c := client(t, dir)
	expect.Message(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{})), "no target size or age",
		"Collect without a target")
	s.Close()
	expect.Error(t, expect.Err(c.Stats(t.Context())), cas.ErrUnavailable, "Stats after the server closed")
}

// TestDial connects only if a process has the store open.
func TestDial(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	expect.Error(t, expect.Err(diskctl.Dial(t.Context(), dir)), diskctl.ErrNoStore, "no directory")
	cache, _ := openStore(t, dir)
	dial := func(when string) {
		t.Helper()
		expect.Error(t, expect.Err(diskctl.Dial(t.Context(), dir)), diskctl.ErrNoServer, "%s", when)
	}
	dial("without a socket")
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "control"), Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	l.Close()
	dial("with the socket of a killed process")
	register := func(r grpc.ServiceRegistrar) { healthpb.RegisterHealthServer(r, health.NewServer()) }
	s := must.Get(diskctl.Serve(dir, cache, register))(t)
	defer s.Close()
	conn := must.Get(diskctl.Dial(t.Context(), dir))(t)
	defer conn.Close()
	expect.Error(t, expect.Err(healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})), nil,
		"a service that register added")
}

// TestSocket uses a directory with a long name in which a killed process left a socket.
func TestSocket(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 50), "store")
	cache, _ := openStore(t, dir)
	if _, err := os.Lstat(filepath.Join(dir, "control")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("socket before Serve: got %v, want none", err)
	}

	t.Chdir(dir)
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: "control", Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	l.Close()

	s := serve(t, dir, cache)
	// Reuse the descriptor through which the server bound the socket.
	other := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(other, "control"), nil, 0o600))
	for range 50 {
		d := must.Get(os.Open(other))(t)
		defer d.Close()
	}
	expect.Equal(t, must.Get(os.Lstat(filepath.Join(dir, "control")))(t).Mode(), os.ModeSocket|0o600, "socket")
	if c := client(t, dir); c.Holder() == 0 {
		t.Error("Open did not connect to the server")
	}
	must.Succeed(t, s.Close())
	expect.Error(t, expect.Err(os.Lstat(filepath.Join(other, "control"))), nil,
		"Close removed a file in another directory")
	expect.Error(t, expect.Err(os.Lstat(filepath.Join(dir, "control"))), os.ErrNotExist,
		"Close did not remove the socket")

	// A socket without a process.
	l = must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: "control", Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	l.Close()
	cache.Close()
	if c := client(t, dir); c.Holder() != 0 {
		t.Errorf("socket without a process: got holder %d, want 0", c.Holder())
	}
}

func TestOpenRefuses(t *testing.T) {
	empty := t.TempDir()
	for _, dir := range []string{empty, filepath.Join(empty, "absent")} {
		if c, err := diskctl.Open(t.Context(), dir, 0); !errors.Is(err, diskctl.ErrNoStore) {
			t.Errorf("%s: got %v, %v, want ErrNoStore", dir, c, err)
		}
	}
	expect.Equal(t, len(must.Get(os.ReadDir(empty))(t)), 0, "Open created")
	// A holder without a server.
	t.Cleanup(diskctl.SetPatience(time.Millisecond))
	dir := filepath.Join(t.TempDir(), "store")
	openStore(t, dir)
	if c, err := diskctl.Open(t.Context(), dir, 0); !errors.Is(err, disk.ErrLocked) ||
		!strings.Contains(err.Error(), fmt.Sprintf("(pid %d)", os.Getpid())) {
		t.Errorf("holder without a socket: got %v, %v, want ErrLocked naming this process", c, err)
	}
}

// TestOpenWaitsForExitingHolder opens a store whose holder has removed the socket but not yet exited.
func TestOpenWaitsForExitingHolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, _ := openStore(t, dir)
	time.AfterFunc(300*time.Millisecond, func() { cache.Close() })
	if c := client(t, dir); c.Holder() != 0 {
		t.Errorf("got holder %d, want 0", c.Holder())
	}
}

// TestOpenTimesOut connects to a process that accepts the connection but is stopped.
func TestOpenTimesOut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	openStore(t, dir)
	serveFake(t, dir, nil)
	t.Cleanup(diskctl.SetPatience(time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if c, err := diskctl.Open(ctx, dir, 0); !errors.Is(err, disk.ErrLocked) ||
		!strings.Contains(err.Error(), "no answer") {
		t.Errorf("got %v, %v, want ErrLocked", c, err)
	}
}

// serveFake serves s on the socket in dir. If s is nil, it accepts connections and does not answer.
func serveFake(t *testing.T, dir string, s cloisterpb.StoreServer) {
	t.Helper()
	// A socket address has at most 108 bytes.
	short := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", short)
	if err == nil {
		err = os.Rename(short, filepath.Join(dir, "control"))
	}
	must.Succeed(t, err)
	t.Cleanup(func() { l.Close() })
	if s != nil {
		server := grpc.NewServer()
		cloisterpb.RegisterStoreServer(server, s)
		go server.Serve(l)
		t.Cleanup(server.Stop)
	}
}

// hostile returns terminal control sequences.
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

func TestTextOfServerIsPrintable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	openStore(t, dir)
	serveFake(t, dir, hostile{})
	c := client(t, dir)
	for name, call := range map[string]func() (string, error){
		"age": func() (string, error) {
			r, err := c.Collect(t.Context(), disk.CollectOptions{DryRun: true})
			return r.Ages[0].Label, err
		},
		"error": func() (string, error) {
			_, err := c.Collect(t.Context(), disk.CollectOptions{})
			return err.Error(), nil
		},
		"location": func() (string, error) {
			r, err := c.Verify(t.Context(), disk.VerifyOptions{})
			return r.Damaged[0].Where, err
		},
	} {
		text, err := call()
		if want := `\x1b]0;owned\a\r\u009b2J\u202e`; err != nil || !strings.HasSuffix(text, want) {
			t.Errorf("%s: got %q, %v, want suffix %q", name, text, err, want)
		}
	}
}

// slow is a rate, in bytes per second, at which Verify does not finish.
const slow = 100

func TestInterruptedVerifyResumes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, ds := openStore(t, dir)
	serve(t, dir, cache)
	c := client(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		// Wait until the large blob, the first, was read.
		for ctx.Err() == nil && cache.Stats().Corrupt == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
	}()
	damage(t, dir, ds[0])
	if _, err := c.Verify(ctx, disk.VerifyOptions{BytesPerSecond: slow}); !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted Verify: got %v, want context.Canceled", err)
	}
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	expect.That(t, err == nil && r.Resumed && r.Blobs != 0 && r.Blobs <= 19 && len(r.Damaged) == 0,
		"second Verify: got %+v, %v, want it to resume", r, err)
	if r, err = c.Verify(t.Context(), disk.VerifyOptions{}); err != nil || r.Resumed || r.Blobs != 19 {
		t.Errorf("third Verify: got %+v, %v, want all 19 blobs", r, err)
	}
}

// TestVerifyInterruptsScrub also checks that Scrub ends with its context.
func TestVerifyInterruptsScrub(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cache, ds := openStore(t, dir)
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
		must.Be(t, t.Context().Err() == nil, "Scrub does not start")
		time.Sleep(10 * time.Millisecond)
	}
	bounded, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	r, err := client(t, dir).Verify(bounded, disk.VerifyOptions{})
	expect.That(t, err == nil && r.Resumed && r.Blobs <= 19,
		"Verify during Scrub: got %+v, %v, want it to resume", r, err)
}
