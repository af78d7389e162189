// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// patient is what somebody sets whose server may be away for a while. Bazel waits 0.1 s before its second
// attempt, twice as long before each next, and 5 s at most: its default of 5 more attempts gives up after 3 s,
// 20 more after more than a minute. --remote_timeout stays at its default of 60 s a call; it need not cover
// the time that a server is away, for a call that is cut off fails at once.
const patient = "--remote_retries=20"

// newGraphRig is newRig with a package //graph in the workspace.
func newGraphRig(t *testing.T, g *bazelrun.Graph) *rig {
	t.Helper()
	r := newRig(t, nil)
	if err := g.Write(r.Workspace); err != nil {
		t.Fatal(err)
	}
	return r
}

// restart stops the server in order, and starts it again after change.
func (r *rig) restart(t *testing.T, change func()) {
	t.Helper()
	if err := r.server.Stop(); err != nil {
		t.Fatal(err)
	}
	change()
	r.serve(t)
}

// clean makes Bazel forget what it built.
func (r *rig) clean(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), bazelTime, errors.New("it takes too long"))
	defer cancel()
	if err := r.Clean(ctx); err != nil {
		t.Fatal(err)
	}
}

// wantGraph checks that the build succeeded and that every byte of its outputs is right.
func (r *rig) wantGraph(t *testing.T, g *bazelrun.Graph, build *bazelrun.Build) {
	t.Helper()
	if build.ExitCode != 0 {
		t.Fatalf("bazel: exit %d, want 0", build.ExitCode)
	}
	dir, err := r.Outputs("graph")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range g.Outputs() {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("output %s has %d bytes that begin with %.16q, %v, want %d that begin with %.16q",
				name, len(got), got, err, len(want), want)
		}
	}
}

// stored reads every input and output of the graph from the server, and returns how many there are. All must
// be there and what their digests say.
func (r *rig) stored(t *testing.T, g *bazelrun.Graph) int {
	t.Helper()
	client, err := remote.Dial(t.Context(), "grpc://"+r.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	store, err := client.Store("")
	if err != nil {
		t.Fatal(err)
	}
	var ds []cas.Digest
	for _, files := range []map[string][]byte{g.Inputs(), g.Outputs()} {
		for _, content := range files {
			ds = append(ds, cas.SHA256.Sum(content))
		}
	}
	missing, err := store.Missing(t.Context(), ds)
	if err != nil || len(missing) > 0 {
		t.Fatalf("%d of %d blobs are lost, among them %v: %v", len(missing), len(ds), missing[:min(3, len(missing))], err)
	}
	for _, d := range ds {
		if _, err := cas.ReadAll(t.Context(), store, d, d.Size()); err != nil {
			t.Fatal(err)
		}
	}
	return len(ds)
}

// TestBuildSurvivesKilledServe: serve is killed every two seconds of a build, and the build does not notice
// but by its time.
func TestBuildSurvivesKilledServe(t *testing.T) {
	t.Parallel()
	// Of four actions at once, these take at least 7.5 s of serve's life, which is cut into pieces of 2 s.
	const kills, least = 8, 3
	g := &bazelrun.Graph{Layers: 10, Width: 30, Pause: "0.1", Lines: func(_, i int) int {
		if i%10 == 0 {
			return 10_000 // a file of its own in the store
		}
		return 0
	}}
	r := newGraphRig(t, g)
	r.restart(t, func() { r.config.Jobs = 4 })
	// So that the first life of serve is not over before Bazel has started.
	r.bazel(t, "build", "//graph:n0_0")

	ctx, cancel := context.WithTimeoutCause(t.Context(), bazelTime, errors.New("it takes too long"))
	defer cancel()
	type ending struct {
		build *bazelrun.Build
		err   error
	}
	ended := make(chan ending, 1)
	go func() {
		build, err := r.Run(ctx, "build", "//graph:all", patient)
		ended <- ending{build, err}
	}()
	var e ending
	killed, over := 0, false
	for !over && killed < kills {
		select {
		case e = <-ended:
			over = true
		case <-time.After(2 * time.Second):
			r.server.Kill()
			killed++
			r.serve(t)
		}
	}
	if !over {
		e = <-ended
	}
	if e.err != nil {
		t.Fatal(e.err)
	}
	if killed < least {
		t.Errorf("the build was over after %d kills, want at least %d", killed, least)
	}
	r.wantGraph(t, g, e.build)

	// What Bazel was told in any of serve's lives holds in the last one.
	actions := g.Layers * g.Width
	blobs := r.stored(t, g)
	r.clean(t)
	build := r.bazel(t, "build", "//graph:all")
	r.wantGraph(t, g, build)
	wantAll(t, build, "remote cache hit")
	if hits := build.Processes()["remote cache hit"]; hits != actions {
		t.Errorf("%d actions are remote cache hits, want %d", hits, actions)
	}
	if !t.Failed() {
		t.Logf("serve was killed %d times while Bazel built %d actions: it lost 0 of their results and 0 of %d blobs", killed, actions, blobs)
	}
}

// hole is what Bazel says of a blob that it was promised and that is not there.
var hole = regexp.MustCompile(`(?i)lost inputs|not[ _]found|missing|no longer available`)

// TestBuildUnderSmallBudget: a store that is far too small ends a build with a word about leases, or slows it,
// but never loses what it has promised.
func TestBuildUnderSmallBudget(t *testing.T) {
	t.Parallel()
	// From 100 to 400 KiB an output. The graph is narrow: a second's lease on all that an action reads and writes
	// must fit, or nobody can build it.
	g := &bazelrun.Graph{Layers: 30, Width: 2, Lines: func(layer, i int) int { return 11_500 * (1 + (layer+2*i)%4) }}
	var need int
	for _, out := range g.Outputs() {
		need += len(out)
	}
	r := newGraphRig(t, g)
	args, budget := r.config.Args, strconv.Itoa(need/5)
	for _, c := range []struct {
		name   string
		limits []string
		flags  []string
		leased bool // for longer than the build takes
	}{
		// What is refused is so at every attempt, and by default Bazel goes on for most of a minute.
		{name: "leased for hours", flags: []string{"--remote_retries=1"}, leased: true},
		// Few actions at once: what those that wait will read is leased too.
		{name: "leased for a second", limits: []string{"--lease", "1s"}, flags: []string{patient, "--jobs=2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.clean(t)
			r.restart(t, func() {
				r.config.Dir, r.config.MaxSize, r.config.Args = filepath.Join(t.TempDir(), "store"), budget, append(args, c.limits...)
			})
			build := r.bazel(t, "build", append(c.flags, "//graph:all")...)
			if found := hole.FindString(build.Output); found != "" {
				t.Errorf("the console says %q", found)
			}
			if build.ExitCode == 0 || !c.leased {
				r.wantGraph(t, g, build)
				return
			}
			for _, want := range []string{`(?i)resource[ _]exhausted`, `(?i)lease`} {
				if !regexp.MustCompile(want).MatchString(build.Output) {
					t.Errorf("bazel: exit %d, and no line of the console matches %q", build.ExitCode, want)
				}
			}
		})
	}
}

// TestBuildAfterLoss: whatever of the store is damaged or lost, Bazel builds what it should.
func TestBuildAfterLoss(t *testing.T) {
	t.Parallel()
	const share, seed = 0.01, 4
	g := &bazelrun.Graph{Layers: 5, Width: 16, Lines: func(layer, i int) int {
		if (layer+i)%3 == 0 {
			return 130_000 // more than one message when it is read
		}
		return 10_000
	}}
	log, metrics := &record{}, unusedAddress(t)
	r := newGraphRig(t, g)
	r.restart(t, func() {
		r.config.Args = append(r.config.Args, "--metrics", metrics)
		r.config.Log = io.MultiWriter(r.config.Log, log)
	})
	r.wantGraph(t, g, r.bazel(t, "build", "//graph:all"))

	rnd := rand.New(rand.NewPCG(seed, seed))
	var flipped, removed, extents int
	small := func() {
		n, err := bazelrun.DamageSegments(r.config.Dir, rnd, share)
		if err != nil {
			t.Fatal(err)
		}
		extents += n
	}
	all := func() {
		small()
		f, m, err := bazelrun.DamageFiles(r.config.Dir, rnd, share)
		if err != nil {
			t.Fatal(err)
		}
		flipped, removed = flipped+f, removed+m
	}
	var counted float64 // by serve, in all its lives
	rounds := 0
	for _, c := range []struct {
		name   string
		damage func()
		stop   bool // serve, while the store is damaged
		clean  bool // Bazel's outputs: all that is damaged is asked for
		fresh  bool // Bazel's server, which then knows nothing of what is present
	}{
		{name: "stopped", damage: all, stop: true},
		{name: "stopped, new Bazel", damage: all, stop: true, clean: true, fresh: true},
		{name: "stopped, clean", damage: all, stop: true, clean: true},
		// A large blob that this life of serve has verified is mounted for an action as it is.
		{name: "running", damage: small},
		{name: "running, clean", damage: all, clean: true},
		{name: "running, clean again", damage: all, clean: true},
	} {
		ok := t.Run(c.name, func(t *testing.T) {
			if c.stop {
				counted += corrupt(t, metrics)
				r.restart(t, c.damage)
			} else {
				c.damage()
			}
			if c.clean {
				r.clean(t)
			}
			if c.fresh {
				if err := r.Shutdown(); err != nil {
					t.Fatal(err)
				}
			}
			g.Edit(2, rounds)
			if err := g.Write(r.Workspace); err != nil {
				t.Fatal(err)
			}
			r.wantGraph(t, g, r.bazel(t, "build", "//graph:all"))
			rounds++
		})
		if !ok {
			t.FailNow()
		}
	}
	counted += corrupt(t, metrics)

	quarantined := map[string]bool{}
	hash := regexp.MustCompile(`[0-9a-f]{64}`)
	err := filepath.WalkDir(filepath.Join(r.config.Dir, "quarantine"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			quarantined[hash.FindString(e.Name())] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for h := range quarantined {
		if h == "" || !strings.Contains(log.text(), h) {
			t.Errorf("blob %q is in quarantine, and the server's log does not name it", h)
		}
	}
	if len(quarantined) == 0 || int(counted) < len(quarantined) {
		t.Errorf("%d blobs are in quarantine, and cloister_cas_corrupt_total has counted %v", len(quarantined), counted)
	}
	t.Logf("%d rounds, %d damaged or lost parts of the store (%d files flipped, %d removed, %d extents of segments): %d blobs found damaged, %d builds right in every byte",
		rounds, flipped+removed+extents, flipped, removed, extents, int(counted), rounds)
}

// corrupt returns how many damaged blobs the server at a metrics address has counted in this life.
func corrupt(t *testing.T, metrics string) float64 {
	t.Helper()
	resp, err := http.Get("http://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`(?m)^cloister_cas_corrupt_total ([0-9.e+]+)$`).FindSubmatch(body)
	if match == nil {
		t.Fatal("the server's metrics have no cloister_cas_corrupt_total")
	}
	n, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// unusedAddress returns a HOST:PORT of loopback on which nothing listens.
func unusedAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// A record keeps what is written to it. It is safe for concurrent use.
type record struct {
	mu  sync.Mutex
	all bytes.Buffer // guarded by mu
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all.Write(p)
}

func (r *record) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all.String()
}
