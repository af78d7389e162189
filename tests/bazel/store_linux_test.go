// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
)

// patient makes Bazel tolerate an absent server. Bazel waits 0.1 s before the second attempt, then twice as long each
// time, at most 5 s: the default of 5 retries gives up after 3 s, 20 after more than a minute. --remote_timeout keeps
// its default of 60 s per call, since a broken call fails at once.
const patient = "--remote_retries=20"

// newGraphRig is newRig with a package //graph in the workspace.
func newGraphRig(t *testing.T, g *bazelrun.Graph) *rig {
	t.Helper()
	r := newRig(t, nil)
	must.Succeed(t, g.Write(r.Workspace))
	return r
}

// restart stops the server, calls change, and starts it again.
func (r *rig) restart(t *testing.T, change func()) {
	t.Helper()
	must.Succeed(t, r.server.Stop())
	change()
	r.serve(t)
}

// clean removes Bazel's outputs.
func (r *rig) clean(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), bazelTime, errors.New("it takes too long"))
	defer cancel()
	must.Succeed(t, r.Clean(ctx))
}

// wantGraph checks that the build succeeded with correct outputs.
func (r *rig) wantGraph(t *testing.T, g *bazelrun.Graph, build *bazelrun.Build) {
	t.Helper()
	must.Be(t, build.ExitCode == 0, "bazel: exit %d, want 0", build.ExitCode)
	dir := must.Get(r.Outputs("graph"))(t)
	for name, want := range g.Outputs() {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("output %s: got %d bytes beginning with %.16q, %v; want %d beginning with %.16q",
				name, len(got), got, err, len(want), want)
		}
	}
}

// stored reads every input and output of the graph from the server, verifies them, and returns their number.
func (r *rig) stored(t *testing.T, g *bazelrun.Graph) int {
	t.Helper()
	client := must.Get(remote.Dial(t.Context(), "grpc://"+r.Endpoint))(t)
	defer client.Close()
	store := must.Get(client.Store(""))(t)
	var ds []cas.Digest
	for _, files := range []map[string][]byte{g.Inputs(), g.Outputs()} {
		for _, content := range files {
			ds = append(ds, cas.SHA256.Sum(content))
		}
	}
	missing, err := store.Missing(t.Context(), ds)
	if err != nil || len(missing) > 0 {
		t.Fatalf("got %d of %d blobs missing, want none; among them %v: %v", len(missing), len(ds), missing[:min(3, len(missing))], err)
	}
	for _, d := range ds {
		must.Get(cas.ReadAll(t.Context(), store, d, d.Size()))(t)
	}
	return len(ds)
}

// TestBuildSurvivesKilledServe kills serve every two seconds during a build, which must still succeed.
func TestBuildSurvivesKilledServe(t *testing.T) {
	t.Parallel()
	// With four actions at a time the build takes at least 7.5 s of serve's lifetime, in pieces of 2 s.
	const kills, least = 8, 3
	g := &bazelrun.Graph{Layers: 10, Width: 30, Pause: "0.1", Lines: func(_, i int) int {
		if i%10 == 0 {
			return 10_000 // a separate file in the store
		}
		return 0
	}}
	r := newGraphRig(t, g)
	r.restart(t, func() { r.config.Jobs = 4 })
	// Starts Bazel before serve is killed for the first time.
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
	must.Succeed(t, e.err)
	expect.That(t, killed >= least, "got %d kills during the build, want at least %d", killed, least)
	r.wantGraph(t, g, e.build)

	// Everything acknowledged before any kill must still hold.
	actions := g.Layers * g.Width
	blobs := r.stored(t, g)
	r.clean(t)
	build := r.bazel(t, "build", "//graph:all")
	r.wantGraph(t, g, build)
	wantAll(t, build, "remote cache hit")
	expect.Equal(t, build.Processes()["remote cache hit"], actions, "remote cache hits")
	if !t.Failed() {
		t.Logf("%d kills during a build of %d actions: 0 results and 0 of %d blobs lost", killed, actions, blobs)
	}
}

// hole matches Bazel's messages about a missing blob that it relied on.
var hole = regexp.MustCompile(`(?i)lost inputs|not[ _]found|missing|no longer available`)

// TestBuildUnderSmallBudget checks that a far too small store fails a build with a message about leases, or slows it
// down, but never loses a promised blob.
func TestBuildUnderSmallBudget(t *testing.T) {
	t.Parallel()
	// Outputs have 100 to 400 KiB. The graph is narrow, since everything that an action reads and writes within a second's
	// lease must fit.
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
		// A refused write is refused at every retry, which would take Bazel most of a minute.
		{name: "leased for hours", flags: []string{"--remote_retries=1"}, leased: true},
		// Few concurrent actions, since inputs of waiting actions are leased too.
		{name: "leased for a second", limits: []string{"--lease", "1s"}, flags: []string{patient, "--jobs=2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.clean(t)
			r.restart(t, func() {
				r.config.Dir, r.config.MaxSize, r.config.Args = filepath.Join(t.TempDir(), "store"), budget, append(args, c.limits...)
			})
			build := r.bazel(t, "build", append(c.flags, "//graph:all")...)
			expect.Equal(t, hole.FindString(build.Output), "", "on the console")
			if build.ExitCode == 0 || !c.leased {
				r.wantGraph(t, g, build)
				return
			}
			for _, want := range []string{`(?i)resource[ _]exhausted`, `(?i)lease`} {
				expect.That(t, regexp.MustCompile(want).MatchString(build.Output),
					"bazel: got exit %d and no console line that matches %q", build.ExitCode, want)
			}
		})
	}
}

// TestBuildAfterLoss checks that Bazel's outputs are correct whatever part of the store is damaged or lost.
func TestBuildAfterLoss(t *testing.T) {
	t.Parallel()
	const share, seed = 0.01, 4
	g := &bazelrun.Graph{Layers: 5, Width: 16, Lines: func(layer, i int) int {
		if (layer+i)%3 == 0 {
			return 130_000 // read in several messages
		}
		return 10_000
	}}
	log := &syncbuf.Buffer{}
	metrics := must.Get(loopback.Address())(t)
	r := newGraphRig(t, g)
	r.restart(t, func() {
		r.config.Args = append(r.config.Args, "--metrics", metrics)
		r.config.Log = io.MultiWriter(r.config.Log, log)
	})
	r.wantGraph(t, g, r.bazel(t, "build", "//graph:all"))

	rnd := rand.New(rand.NewPCG(seed, seed))
	var flipped, removed, extents int
	small := func() {
		extents += must.Get(bazelrun.DamageSegments(r.config.Dir, rnd, share))(t)
	}
	all := func() {
		small()
		f, m, err := bazelrun.DamageFiles(r.config.Dir, rnd, share)
		must.Succeed(t, err)
		flipped, removed = flipped+f, removed+m
	}
	var counted float64 // by all starts of serve
	rounds := 0
	for _, c := range []struct {
		name   string
		damage func()
		stop   bool // stop serve while the store is damaged
		clean  bool // remove Bazel's outputs, so that damaged blobs are requested
		fresh  bool // restart Bazel's server, which then does not know which blobs are present
	}{
		{name: "stopped", damage: all, stop: true},
		{name: "stopped, new Bazel", damage: all, stop: true, clean: true, fresh: true},
		{name: "stopped, clean", damage: all, stop: true, clean: true},
		// A large blob verified since serve started is mounted without another check.
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
				must.Succeed(t, r.Shutdown())
			}
			g.Edit(2, rounds)
			must.Succeed(t, g.Write(r.Workspace))
			r.wantGraph(t, g, r.bazel(t, "build", "//graph:all"))
			rounds++
		})
		if !ok {
			t.FailNow()
		}
	}
	quarantined := map[string]bool{}
	hash := regexp.MustCompile(`[0-9a-f]{64}`)
	err := filepath.WalkDir(filepath.Join(r.config.Dir, "quarantine"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			quarantined[hash.FindString(e.Name())] = true
		}
		return err
	})
	must.Succeed(t, err)
	counted += corrupt(t, metrics)
	for h := range quarantined {
		must.Hold(t, "the server's log has the blob of each file in quarantine, also of "+h, func() bool {
			return h != "" && strings.Contains(log.String(), h)
		})
	}
	expect.That(t, len(quarantined) != 0 && int(counted) >= len(quarantined),
		"got %d blobs in quarantine, want cloister_cas_corrupt_total, %v", len(quarantined), counted)
	t.Logf("%d rounds, %d damaged or lost parts of the store (%d files flipped, %d removed, %d extents of segments): %d blobs found damaged, %d builds right in every byte",
		rounds, flipped+removed+extents, flipped, removed, extents, int(counted), rounds)
}

// corrupt returns the value of cloister_cas_corrupt_total at a metrics address.
func corrupt(t *testing.T, metrics string) float64 {
	t.Helper()
	resp, err := http.Get("http://" + metrics + "/metrics")
	must.Succeed(t, err)
	defer resp.Body.Close()
	body := must.Get(io.ReadAll(resp.Body))(t)
	match := regexp.MustCompile(`(?m)^cloister_cas_corrupt_total ([0-9.e+]+)$`).FindSubmatch(body)
	must.Be(t, match != nil, "got no metric cloister_cas_corrupt_total")
	return must.Get(strconv.ParseFloat(string(match[1]), 64))(t)
}
