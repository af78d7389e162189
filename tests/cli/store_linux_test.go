// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	"github.com/bazelbuild/remote-apis-sdks/go/pkg/digest"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
)

// A diskStore is a store on disk, with or without a server that holds it.
type farm struct {
	server *bazelrun.Server
	client *client.Client
	dir    string
	log    *bytes.Buffer
}

// farming starts a server with additional flags, which the test may stop.
func farming(t *testing.T, flags ...string) *farm {
	t.Helper()
	s, dir, log := start(t, flags...)
	f := &farm{server: s, dir: dir, log: log}
	t.Cleanup(f.stop)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of serve:\n%s", log)
		}
	})
	f.client = dialed(t, s.Addr)
	return f
}

func dialed(t *testing.T, addr string) *client.Client {
	t.Helper()
	c, err := client.NewClient(t.Context(), "main", client.DialParams{Service: addr, NoSecurity: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// stop stops the server unless it has ended.
func (f *farm) stop() {
	if f.server != nil {
		_ = f.server.Stop()
		f.server = nil
	}
}

// put writes a small and a large blob made of text and returns them.
func (f *farm) put(t *testing.T, text string) (small, large digest.Digest) {
	t.Helper()
	small, err := f.client.WriteBlob(t.Context(), []byte(text))
	if err == nil {
		large, err = f.client.WriteBlob(t.Context(), bytes.Repeat([]byte(text), 200_000/len(text)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return small, large
}

// missing returns the number of absent blobs.
func missing(t *testing.T, c *client.Client, ds ...digest.Digest) int {
	t.Helper()
	absent, err := c.MissingBlobs(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	return len(absent)
}

// counts is the JSON output of the commands.
type counts struct {
	Holder, Blobs, Files, Segments, Corrupt, Quarantined int
	Bytes                                                int64
	Freed                                                int64 `json:"freed_bytes"`
	Leased                                               int64 `json:"leased_bytes"`
	EvictedBytes                                         int64 `json:"evicted_bytes"`
	Complete, Resumed                                    bool
	Damaged                                              []struct{ Instance, Digest, Where, Kept string }
}

// counted runs a command with --json and checks its exit code.
func (f *farm) counted(t *testing.T, code int, args ...string) (c counts) {
	t.Helper()
	s := cloister(t, "", append(args, "--json", "--dir", f.dir)...)
	if err := json.Unmarshal([]byte(s.out), &c); err != nil || s.code != code {
		t.Fatalf("cloister %v: got %v, exit code %d, want %d\n%s%s", args, err, s.code, code, s.out, s.err)
	}
	return c
}

// until calls done until it returns true, for at most a minute.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out after a minute: %s", what)
		}
	}
}

// TestGC checks that a dry run removes nothing and reports what would be removed, and that leased blobs stay.
func TestGC(t *testing.T) {
	f := farming(t, "--lease", "0")
	small, large := f.put(t, "old")
	pid := f.server.PID
	for _, held := range []bool{true, false} {
		none := "--lease=0" // a server reports its own lease
		if !held {
			f.put(t, "new")
			f.stop()
		}
		before := f.counted(t, 0, "cas", "stat", none)
		if before.Blobs < 2 || (before.Holder == pid) != held {
			t.Fatalf("held %v: stat: got %+v", held, before)
		}
		var would counts
		until(t, "a blob is a second old", func() bool {
			would = f.counted(t, 0, "gc", "--dry-run", none)
			return would.Files >= 1 && would.Segments >= 1 && would.Freed > 200_000
		})
		if after := f.counted(t, 0, "cas", "stat", none); after.Blobs != before.Blobs || after.Bytes != before.Bytes {
			t.Errorf("held %v: after a dry run: got %+v, want %+v", held, after, before)
		}
		if s := cloister(t, "", "gc", none, "--dry-run", "--dir", f.dir); s.code != 0 || !regexp.MustCompile(`\nwould go +\d+.* KiB: at most, `).MatchString(s.out) {
			t.Errorf("held %v: dry run: got exit code %d and\n%s%s", held, s.code, s.out, s.err)
		}
		s := cloister(t, "", "gc", none, "--older-than", "1s", "--dir", f.dir)
		for _, want := range []string{
			`^store +` + f.dir + `, held by `, `\nremoved +\d+.* KiB: not used for 1s\n +\d+ large blobs\n +\d+ small blobs and results, with \d+ segments\n`,
			`\nstays +`, `\nleased +nothing`, `\nused within a day +\d+ `,
		} {
			if s.code != 0 || !regexp.MustCompile(want).MatchString(s.out) {
				t.Errorf("held %v: got exit code %d and\n%s%s\nwant 0 and a match of %q", held, s.code, s.out, s.err, want)
			}
		}
		if after := f.counted(t, 0, "cas", "stat", none); after.Blobs != 0 {
			t.Errorf("held %v: after gc: got %+v, want no blobs", held, after)
		}
		if held && missing(t, f.client, small, large) != 2 {
			t.Error("got removed blobs reported present")
		}
	}
}

func TestGCLeavesWhatIsLeased(t *testing.T) {
	f := farming(t) // with a lease of 3 hours
	small, large := f.put(t, "in use")
	for _, held := range []bool{true, false} {
		if !held {
			f.stop()
		}
		s := cloister(t, "", "gc", "--max-size", "4KiB", "--dir", f.dir)
		if s.code != 1 || !regexp.MustCompile(`\nleased +19\d\.\d KiB: used in the last 3h; unless used again it can be removed by \w+ \d+ \d\d:\d\d\n`).MatchString(s.out) ||
			!strings.Contains(s.err, "--max-size 4.0 KiB") {
			t.Errorf("held %v: unreachable size: got %+v, want exit code 1", held, s)
		}
		if s := cloister(t, "", "gc", "--older-than", "1s", "--dir", f.dir); s.code != 0 {
			t.Errorf("held %v: got %+v, want exit code 0", held, s)
		}
		if c := f.counted(t, 0, "cas", "stat"); c.Blobs < 2 || c.Leased < 200_000-1000 {
			t.Errorf("held %v: after gc: got %+v, want the leased blobs", held, c)
		}
		if held && missing(t, f.client, small, large) > 0 {
			t.Error("gc removed leased blobs")
		}
	}
}

// TestInputsOutliveTheirLease checks that inputs stay while their actions run or wait, in a store that evicts constantly.
func TestInputsOutliveTheirLease(t *testing.T) {
	f := farming(t, "--lease", "2s", "--max-size", "8MiB", "--jobs", "1")
	var needed []digest.Digest
	for _, script := range []string{"sleep 60", "sleep 61"} {
		input, err := f.client.WriteBlob(t.Context(), []byte("an input of "+script))
		if err != nil {
			t.Fatal(err)
		}
		put := func(m proto.Message) *repb.Digest {
			d, err := f.client.WriteProto(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			needed = append(needed, d)
			return d.ToProto()
		}
		needed = append(needed, input)
		action := put(&repb.Action{
			CommandDigest:   put(&repb.Command{Arguments: []string{"/bin/sh", "-c", script}}),
			InputRootDigest: put(&repb.Directory{Files: []*repb.FileNode{{Name: "input", Digest: input.ToProto()}}}),
		})
		// The first one has the slot; both end with the server.
		if _, err := f.client.Execute(t.Context(), &repb.ExecuteRequest{InstanceName: "main", ActionDigest: action}); err != nil {
			t.Fatal(err)
		}
	}
	other, _ := f.put(t, "of nobody")
	i := 0
	until(t, "everything unused is evicted", func() bool {
		for range 10 {
			i++
			_, err := f.client.WriteBlob(t.Context(), bytes.Repeat(fmt.Appendf(nil, "%08d", i), 40_000))
			if err != nil && !strings.Contains(err.Error(), "ResourceExhausted") {
				t.Fatal(err)
			}
		}
		return f.counted(t, 0, "cas", "stat").EvictedBytes > 10<<20
	})
	if n := missing(t, f.client, other); n != 1 {
		t.Error("got an unused blob, want it evicted")
	}
	if n := missing(t, f.client, needed...); n > 0 {
		t.Errorf("%d of %d blobs of running and waiting actions are missing, want none", n, len(needed))
	}
	f.server.Kill()
	f.server = nil
}

// flip changes a byte of each blob on disk: the small one is text, and the large one begins with it.
func (f *farm) flip(t *testing.T, text string, large digest.Digest) {
	t.Helper()
	segments, err := filepath.Glob(filepath.Join(f.dir, "segments", "*.data"))
	if err != nil {
		t.Fatal(err)
	}
	flipped := 0
	change := func(path string, at int) {
		w, err := os.OpenFile(path, os.O_WRONLY, 0)
		if errors.Is(err, os.ErrPermission) {
			if err = os.Chmod(path, 0o600); err == nil {
				w, err = os.OpenFile(path, os.O_WRONLY, 0)
			}
		}
		if err == nil {
			_, err = w.WriteAt([]byte("X"), int64(at))
			w.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		flipped++
	}
	for _, path := range segments {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// The newest copy, since earlier ones may be unused.
		if at := bytes.LastIndex(b, []byte(text)); at >= 0 {
			change(path, at)
		}
	}
	files, err := filepath.Glob(filepath.Join(f.dir, "files", "*", "sha256", "*", fmt.Sprintf("%s-%d", large.Hash, large.Size)))
	if err != nil || len(files) != 1 {
		t.Fatalf("files of %s: got %q, %v, want one", large, files, err)
	}
	change(files[0], 77)
	if flipped != 2 {
		t.Fatalf("flipped %d bytes, want 2", flipped)
	}
}

// TestVerifyFindsAFlippedByte covers segments and files, with and without a running server.
func TestVerifyFindsAFlippedByte(t *testing.T) {
	metrics := unused(t)
	f := farming(t, "--metrics", metrics)
	pid := f.server.PID
	const text = "a blob that is small"
	small, large := f.put(t, text)
	if s := cloister(t, "", "cas", "verify", "--dir", f.dir); s.code != 0 || !whole(`(?s)store .*, held by process \d+, which answers\nverified +\d+ blobs.*: sound\n`, s.out) {
		t.Errorf("sound store: got %+v", s)
	}
	f.flip(t, text, large)
	found := f.counted(t, 1, "cas", "verify")
	if len(found.Damaged) != 2 || !found.Complete || found.Holder != pid {
		t.Fatalf("two flipped bytes: got %+v", found)
	}
	for _, d := range found.Damaged {
		b, err := os.ReadFile(d.Kept)
		if err != nil || !bytes.Contains(b, []byte("X")) || d.Instance != "main" || !whole(`segments/\d+\.data at \d+|files/@main/.*`, d.Where) ||
			d.Digest != small.String() && d.Digest != large.String() {
			t.Errorf("%+v: got quarantined blob %.40q, %v", d, b, err)
		}
		if !regexp.MustCompile(`level=WARN msg="damaged blob.* digest=` + d.Digest + ` instance=main where=\S+.* kept=` + d.Kept).Match(f.log.Bytes()) {
			t.Errorf("got log\n%s\nwant a warning about %s", f.log, d.Digest)
		}
	}
	if n := missing(t, f.client, small, large); n != 2 {
		t.Errorf("got %d damaged blobs missing, want 2", n)
	}
	for _, want := range []string{
		"\ncloister_cas_corrupt_total 2\n", "\ncloister_cas_lease_seconds 10800\n", "\ncloister_cas_evicted_bytes_total 0\n",
		"\ncloister_cas_evicted_blobs_total 0\n", "\ncloister_cas_segments 1\n", "\ncloister_cas_limit_files ", "\ncloister_cas_files ", "\ncloister_ready 1\n",
	} {
		if _, text := get(t, metrics, "/metrics"); !strings.Contains(text, want) {
			t.Errorf("got metrics without %q", want)
		}
	}
	if s := cloister(t, "", "cas", "stat", "--dir", f.dir); s.code != 0 || !strings.Contains(s.out, "\ndamaged      2 blobs since then\nquarantine   2 blobs in "+f.dir) {
		t.Errorf("stat: got %+v", s)
	}
	// A blob that is uploaded again is sound until it is damaged again.
	if f.put(t, text); missing(t, f.client, small, large) > 0 {
		t.Error("got blobs missing after they were put again")
	}
	f.counted(t, 0, "cas", "verify")
	f.stop()
	f.flip(t, text, large)
	s := cloister(t, "", "cas", "verify", "--dir", f.dir)
	if s.code != 1 || s.err != "" || !strings.Contains(s.out, "held by no process\n") || strings.Count(s.out, "\n  kept as    "+f.dir) != 2 ||
		!strings.Contains(s.out, "damaged      "+small.String()+"\n  instance   main\n  was in     ") || !strings.Contains(s.out, ": 2 damaged; they are absent until uploaded again") {
		t.Errorf("without a server: got %+v", s)
	}
	if s := cloister(t, "", "cas", "verify", "--dir", f.dir); s.code != 0 {
		t.Errorf("second verification: got %+v, want exit code 0", s)
	}
}

// TestVerifyResumesAfterCtrlC covers stores with and without a running server.
func TestVerifyResumesAfterCtrlC(t *testing.T) {
	f := farming(t)
	const text = "the first one"
	for _, held := range []bool{true, false} {
		// At a byte per second it does not get past the first blob.
		small, large := f.put(t, text)
		if !held {
			f.stop()
		}
		f.flip(t, text, large)
		kept := filepath.Join(f.dir, "quarantine", fmt.Sprintf("%s-%d", small.Hash, small.Size))
		cmd := exec.CommandContext(t.Context(), built.Path(t), "cas", "verify", "--rate", "1B", "--dir", f.dir)
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		until(t, "the first blob is found damaged", func() bool {
			_, err := os.Stat(kept)
			return err == nil
		})
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // the exit code is checked below
		if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(stderr.String(), "the next cloister cas verify resumes there") {
			t.Errorf("held %v: got exit code %d, want 130 and a hint\n%s%s", held, code, &out, &stderr)
		}
		// The other damaged blob is after the stopping point.
		next := f.counted(t, 1, "cas", "verify")
		if !next.Resumed || !next.Complete || len(next.Damaged) != 1 || next.Damaged[0].Digest != large.String() {
			t.Errorf("held %v: resumed verification: got %+v", held, next)
		}
		if again := f.counted(t, 0, "cas", "verify"); again.Resumed {
			t.Errorf("held %v: verification after that: got %+v", held, again)
		}
		if err := os.Remove(kept); err != nil {
			t.Fatal(err)
		}
	}
}

// TestScrub checks that serve finds blobs that were damaged while it did not run.
func TestScrub(t *testing.T) {
	f := farming(t)
	const text = "damaged at rest"
	small, large := f.put(t, text)
	f.stop()
	f.flip(t, text, large)
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: f.dir, Home: t.TempDir(), Listen: "127.0.0.1:0", Args: []string{"--scrub", "100MiB"},
	})
	if err != nil {
		t.Fatal(err)
	}
	f.server = s
	until(t, "the scrub finds both", func() bool { return f.counted(t, 0, "cas", "stat").Corrupt == 2 })
	if n := missing(t, dialed(t, s.Addr), small, large); n != 2 {
		t.Errorf("got %d damaged blobs missing, want 2", n)
	}
}

func TestServeTakesItsLimits(t *testing.T) {
	f := farming(t, "--lease", "12h", "--max-blob", "1MiB", "--max-files", "1000", "--sync")
	if want := "store    used blobs are kept for 12h, synced\n"; !strings.Contains(f.log.String(), want) {
		t.Errorf("got\n%s\nwant %q in it", f.log, want)
	}
	s := cloister(t, "", "cas", "stat", "--dir", f.dir)
	if !strings.Contains(s.out, " of 1000, ") || !strings.Contains(s.out, "used in the last 12h\n") {
		t.Errorf("stat: got %+v", s)
	}
	if _, err := f.client.WriteBlob(t.Context(), make([]byte, 1<<20)); err != nil {
		t.Errorf("largest permitted blob: got %v, want no error", err)
	}
	if _, err := f.client.WriteBlob(t.Context(), make([]byte, 1<<20+1)); err == nil || !strings.Contains(err.Error(), "max_cas_blob_size_bytes, 1048576 bytes") {
		t.Errorf("larger blob: got %v, want max_cas_blob_size_bytes", err)
	}
}

// TestCommandsAfterAKill checks that the stale socket of a killed server does no harm.
func TestCommandsAfterAKill(t *testing.T) {
	f := farming(t)
	f.put(t, "kept")
	f.server.Kill()
	f.server = nil
	if fi, err := os.Lstat(filepath.Join(f.dir, "control")); err != nil || fi.Mode().Type() != os.ModeSocket {
		t.Fatalf("socket: got %v, %v", fi, err)
	}
	if c := f.counted(t, 0, "cas", "stat"); c.Holder != 0 || c.Blobs < 2 {
		t.Errorf("stat: got %+v", c)
	}
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{Binary: built.Path(t), Dir: f.dir, Home: t.TempDir(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	f.server = s
	if c := f.counted(t, 0, "cas", "stat"); c.Holder != s.PID || c.Blobs < 2 {
		t.Errorf("stat of the next server: got %+v", c)
	}
}

// TestAnotherUserIsRefused checks that another user cannot open a store that no server holds, since its owner could not read the
// new files.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "root", "only it may read what another user owns")
	}
	f := farming(t)
	f.stop()
	if err := os.Chown(f.dir, 63210, 63210); err != nil {
		t.Fatal(err)
	}
	if s := cloister(t, "", "cas", "stat", "--dir", f.dir); s.code != 3 || !strings.Contains(s.err, "belongs to user 63210") {
		t.Errorf("got %+v", s)
	}
}

// unused returns an unused address.
func unused(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// get returns the response of an HTTP server.
func get(t *testing.T, addr, path string) (code int, text string) {
	t.Helper()
	r, err := http.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// health returns the health of a service.
func health(t *testing.T, c *client.Client, service string) healthpb.HealthCheckResponse_ServingStatus {
	t.Helper()
	r, err := healthpb.NewHealthClient(c.Connection()).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		t.Fatal(err)
	}
	return r.Status
}

const casService = "build.bazel.remote.execution.v2.ContentAddressableStorage"

// TestReadinessGivesReasons covers an unreachable upstream and a store in which everything is leased.
func TestReadinessGivesReasons(t *testing.T) {
	for _, c := range []struct {
		name    string
		flags   []string
		provoke func(f *farm)
		reason  string
	}{
		{"upstream", []string{"--cas", "grpc://" + unused(t)}, func(*farm) {}, `upstream grpc://127\.0\.0\.1:\d+ is down since \S+Z: .+\n`},
		{"full", []string{"--max-size", "8MiB"}, func(f *farm) {
			for i := range 100 {
				_, err := f.client.WriteBlob(t.Context(), bytes.Repeat([]byte(fmt.Sprintf("%08d", i)), 50_000))
				if err != nil {
					if !strings.Contains(err.Error(), "ResourceExhausted") {
						t.Error(err)
					}
					return
				}
			}
			t.Error("a store of 8 MiB accepted 40 MB, want ResourceExhausted")
		}, `full since \S+Z: .*are in use or were used within the lease.*\n`},
	} {
		t.Run(c.name, func(t *testing.T) {
			metrics := unused(t)
			f := farming(t, append(c.flags, "--metrics", metrics)...)
			c.provoke(f)
			var code int
			var text string
			until(t, "it is not ready", func() bool {
				code, text = get(t, metrics, "/ready")
				return code != 200 && health(t, f.client, "") == healthpb.HealthCheckResponse_NOT_SERVING
			})
			if code != 503 || !whole(c.reason, text) {
				t.Errorf("/ready: got %d, %q", code, text)
			}
			if code, _ := get(t, metrics, "/live"); code != 200 {
				t.Errorf("/live: got %d, want 200", code)
			}
			if got := health(t, f.client, casService); got != healthpb.HealthCheckResponse_SERVING {
				t.Errorf("health of the CAS: got %v, want SERVING", got)
			}
		})
	}
}

func TestReadyAndDraining(t *testing.T) {
	metrics := unused(t)
	f := farming(t, "--metrics", metrics)
	if code, text := get(t, metrics, "/ready"); code != 200 || text != "ready\n" {
		t.Errorf("/ready: got %d, %q", code, text)
	}
	if got := health(t, f.client, ""); got != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health: got %v, want SERVING", got)
	}
	// An action that runs until the server drains.
	hold := make(chan struct{})
	r := &remote{Client: f.client, dir: f.dir}
	go func() {
		defer close(hold)
		r.execute(t, "sleep 3; cat input > out")
	}()
	until(t, "the action runs", func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "\ncloister_actions_running 1\n")
	})
	if err := syscall.Kill(f.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	until(t, "it drains", func() bool {
		code, text := get(t, metrics, "/ready")
		return code == 503 && strings.HasPrefix(text, "draining")
	})
	<-hold
}

// TestUpstream tests a server with an upstream, with each way of writing.
func TestUpstream(t *testing.T) {
	for _, write := range []string{"through", "back"} {
		t.Run(write, func(t *testing.T) {
			upstream := farming(t)
			metrics := unused(t)
			local := farming(t, "--cas", "grpc://"+upstream.server.Addr, "--cas-write", write, "--metrics", metrics)
			if want := "upstream grpc://" + upstream.server.Addr + "   (write " + write + ")\n"; !strings.Contains(local.log.String(), want) {
				t.Errorf("got\n%s\nwant %q in it", local.log, want)
			}
			until(t, "it is ready", func() bool {
				code, _ := get(t, metrics, "/ready")
				return code == 200
			})
			a, b := upstream.put(t, "from upstream")
			if missing(t, local.client, a, b) > 0 {
				t.Error("got blobs of the upstream missing on the server")
			}
			if text, _, err := local.client.ReadBlob(t.Context(), a); err != nil || string(text) != "from upstream" {
				t.Errorf("read through: got %q, %v", text, err)
			}
			c, d := local.put(t, "from local")
			r := &remote{Client: local.client, dir: local.dir}
			action, response := r.execute(t, "cat input > out")
			if write == "back" {
				local.stop() // sends what is left
			}
			if n := missing(t, upstream.client, c, d); n > 0 {
				t.Errorf("upstream: got %d blobs missing, want none", n)
			}
			s := cloister(t, "", "action", "show", action, "--cas", "grpc://"+upstream.server.Addr, "--instance", "main")
			if s.code != 0 || !strings.Contains(s.out, "\nresult       exit code 0\n") || response.Result.ExitCode != 0 {
				t.Errorf("result on the upstream: got %+v", s)
			}
			if local.server == nil {
				return
			}
			// Without its upstream, the server keeps serving local blobs and reports that it is down.
			upstream.stop()
			until(t, "it is not ready", func() bool {
				code, text := get(t, metrics, "/ready")
				return code == 503 && strings.HasPrefix(text, "upstream ")
			})
			if _, text := get(t, metrics, "/metrics"); !strings.Contains(text, "\ncloister_cas_upstream_up 0\n") {
				t.Errorf("got metrics\n%s\nwant the upstream down", text)
			}
			if text, _, err := local.client.ReadBlob(t.Context(), c); err != nil || string(text) != "from local" {
				t.Errorf("local blob without the upstream: got %q, %v", text, err)
			}
		})
	}
}

// TestUnsentBlobsAreSentBeforeTheEnd checks that a stopping server sends what its upstream missed while it was down.
func TestUnsentBlobsAreSentBeforeTheEnd(t *testing.T) {
	addr := unused(t)
	local := farming(t, "--cas", "grpc://"+addr, "--cas-write", "back")
	a, b := local.put(t, "from local")
	upstream := farming(t, "--listen", addr)
	if err := local.server.Stop(); err != nil {
		t.Error(err)
	}
	local.server = nil
	if n := missing(t, upstream.client, a, b); n > 0 || !strings.Contains(local.log.String(), "\nsending  ") {
		t.Errorf("upstream: got %d blobs missing, want none; log of serve:\n%s", n, local.log)
	}
}

// TestReadsSucceedInAFullStore checks that blobs that do not fit locally are still served, and that the server stays ready.
func TestReadsSucceedInAFullStore(t *testing.T) {
	upstream := farming(t)
	metrics := unused(t)
	local := farming(t, "--cas", "grpc://"+upstream.server.Addr, "--max-size", "8MiB", "--metrics", metrics)
	for i := range 30 {
		blob := bytes.Repeat(fmt.Appendf(nil, "%08d", i), 50_000)
		d, err := upstream.client.WriteBlob(t.Context(), blob)
		if err != nil {
			t.Fatal(err)
		}
		if got, _, err := local.client.ReadBlob(t.Context(), d); err != nil || !bytes.Equal(got, blob) {
			t.Fatalf("blob %d: %d bytes, %v", i, len(got), err)
		}
	}
	if c := local.counted(t, 0, "cas", "stat"); c.Blobs >= 30 {
		t.Fatalf("got %+v, want blobs that did not fit", c)
	}
	until(t, "it is ready", func() bool {
		code, text := get(t, metrics, "/ready")
		if strings.Contains(text, "full") {
			t.Fatalf("/ready: got %d, %q", code, text)
		}
		return code == 200
	})
}

// TestUpstreamIsDownForLong checks that with write back everything succeeds, unsent blobs are not collected, and the final
// sending can be observed and aborted.
func TestUpstreamIsDownForLong(t *testing.T) {
	metrics := unused(t)
	flags := []string{"--cas", "grpc://" + unused(t), "--metrics", metrics, "--lease", "1s", "--cas-write"}
	local := farming(t, append(flags, "back")...)
	a, b := local.put(t, "yet to be sent")
	if code, text := get(t, metrics, "/ready"); code != 200 {
		t.Errorf("/ready: got %d, %q, want 200", code, text)
	}
	pending := func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "\ncloister_cas_upstream_up 0\n") && strings.Contains(text, "\ncloister_cas_upstream_pending 2\n") &&
			strings.Contains(text, "\ncloister_cas_upstream_sent_total 0\n") && strings.Contains(text, "\ncloister_cas_upstream_unasked_total ")
	}
	if !pending() {
		t.Error("got metrics without a down upstream and two pending blobs")
	}
	if err := syscall.Kill(local.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	until(t, "it serves no more", func() bool {
		c, err := net.Dial("tcp", local.server.Addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	// It continues until the second signal.
	for range 20 {
		if code, _ := get(t, metrics, "/live"); code != 200 || !pending() {
			t.Fatalf("while it sends: /live: got %d, want 200 and two pending blobs", code)
		}
		time.Sleep(50 * time.Millisecond)
	}
	err := local.server.Stop()
	local.server = nil
	if err != nil || !whole(`(?s).*\nsending  2 blobs and results to grpc://\S+, for up to 10m0s; .*\n +upstream .* is down since .*`, local.log.String()) {
		t.Errorf("got %v and log\n%s", err, local.log)
	}

	journal := filepath.Join(local.dir, "upstream.journal")
	old := []string{"gc", "--older-than", "1s", "--lease", "1s", "--dir", local.dir}
	if s := cloister(t, "", old...); s.code != 3 || !strings.Contains(s.err, "2 blobs and results wait to be sent") || !strings.Contains(s.err, journal) {
		t.Errorf("gc: got %+v", s)
	}
	if s := cloister(t, "", append(old, "--dry-run")...); s.code != 0 {
		t.Errorf("gc --dry-run: got %+v", s)
	}
	var log bytes.Buffer
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: local.dir, Home: t.TempDir(), Listen: "127.0.0.1:0", Args: append(flags, "through"), Log: &log,
	})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Stop()
	if want := `level=WARN msg="writes wait for an upstream.*--cas-write back.* "blobs and results"=2 journal=` + journal; err != nil || !regexp.MustCompile(want).Match(log.Bytes()) {
		t.Errorf("got %v and log\n%s\nwant a match of %q", err, &log, want)
	}
	if c := local.counted(t, 0, "cas", "stat"); c.Blobs < 2 {
		t.Errorf("blobs %s and %s: got %+v, want them kept", a, b, c)
	}
}

// TestBucket checks that a second server on the same bucket has the contents of the first.
func TestBucket(t *testing.T) {
	confined(t)
	objects := s3mem.New()
	if err := objects.CreateBucket("farm-cache"); err != nil {
		t.Fatal(err)
	}
	bucket := httptest.NewServer(gofakes3.New(objects).Server())
	defer bucket.Close()
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, ".aws"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(home, ".aws"), "credentials", "[default]\naws_access_key_id = AKIDEXAMPLE\naws_secret_access_key = not one\n")
	url := "s3://farm-cache/tests?region=us-east-1&endpoint=" + bucket.URL
	serve := func() (*bazelrun.Server, error) {
		return bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
			Binary: built.Path(t), Dir: filepath.Join(t.TempDir(), "store"), Home: home, Listen: "127.0.0.1:0", Args: []string{"--store", url},
		})
	}
	var d digest.Digest
	for i := range 2 {
		s, err := serve()
		if err != nil {
			t.Fatal(err)
		}
		c := dialed(t, s.Addr)
		if i == 0 {
			if d, err = c.WriteBlob(t.Context(), []byte("for all")); err != nil {
				t.Error(err)
			}
		} else if text, _, err := c.ReadBlob(t.Context(), d); err != nil || string(text) != "for all" {
			t.Errorf("blob from the bucket: got %q, %v", text, err)
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}
	bucket.Close()
	if s, err := serve(); err == nil {
		s.Kill()
		t.Error("serve started without its bucket")
	} else if !strings.Contains(err.Error(), "exit status 5") || !strings.Contains(err.Error(), "--store: ") {
		t.Error(err)
	}
}
