// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A shardedFarm is Buildbarn's scheduler with a storage that divides blobs and results between two others.
type shardedFarm struct {
	*buildbarn
	shards [2]*peers.Server
	client *remote.Store // of the storage in front
}

// divide starts the storage in front of the shards, in the place of an earlier one. An empty address is a lost shard.
func (f *shardedFarm) divide(t *testing.T, one, two string) {
	t.Helper()
	o := peers.Options{Args: []string{"-shards", one + "," + two}}
	if f.store != nil {
		must.Succeed(t, f.store.Stop())
		o.Listen = f.store.Addr
	}
	f.store = launch(t, peers.BBStorage, o)
}

// TestGrowingToTwoShards checks docs/growing.md, step 4, with sharded storage. Results are correct with two shards.
// While one shard is down, actions that need it fail with UNAVAILABLE or wait, and no result is wrong. Once the front
// storage omits the shard, everything works again, and clients upload lost blobs again.
func TestGrowingToTwoShards(t *testing.T) {
	f := &shardedFarm{buildbarn: &buildbarn{metrics: must.Get(loopback.Address())(t)}}
	for i := range f.shards {
		f.shards[i] = startAs(t, peers.BBStorage, true)
	}
	f.divide(t, f.shards[0].Addr, f.shards[1].Addr)
	f.client = dial(t, f.store, "")
	f.schedule(t, "")
	f.join(t, "one", "--property", "os=linux")
	const n = 20
	actions := f.wantBuilds(t, n)
	f.wantDivided(t, n)

	f.shards[1].Kill()
	// Actions whose blobs are away fail, until the worker finds its store away: then they wait.
	failed, waited := 0, false
	for i, d := range actions {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err := f.run(ctx, t, i, d)
		cancel()
		if status.Code(err) == codes.DeadlineExceeded {
			waited = true // the worker has noticed that its store lacks a shard
			break
		}
		if err != nil {
			expect.Code(t, err, codes.Unavailable, "action %d without a shard", i)
			failed++
		}
	}
	must.Be(t, failed > 0 || waited, "no action fails without half of the blobs")

	f.divide(t, f.shards[0].Addr, "")
	f.wantBuilds(t, n+5)
}

// wantBuilds waits until each of n actions succeeds, and returns their digests. A scheduler refuses actions before its
// first worker has joined, and connections to a restarted storage break.
func (f *shardedFarm) wantBuilds(t *testing.T, n int) (actions []*repb.Digest) {
	t.Helper()
	for i := range n {
		text, _ := script(i)
		var d *repb.Digest
		var err error
		must.Be(t, must.Poll(time.Minute, func() bool {
			if d, err = uploadAction(t.Context(), f.client, text, time.Minute); err == nil {
				err = f.run(t.Context(), t, i, d)
			}
			return err == nil
		}), "action %d does not succeed: %v", i, err)
		actions = append(actions, d)
	}
	return actions
}

// script returns the script of an action, and its output.
func script(i int) (text, output string) {
	return fmt.Sprintf("cat in/name > out/copy && echo %d >> out/copy", i), fmt.Sprintf("an input\n%d\n", i)
}

// run executes an action and reads its output. It fails the test if the output is wrong. Errors are statuses.
func (f *shardedFarm) run(ctx context.Context, t *testing.T, i int, action *repb.Digest) error {
	t.Helper()
	_, want := script(i)
	r, err := executeOnce(ctx, f.scheduler.Addr, "", action)
	if err == nil {
		err = status.FromProto(r.GetStatus()).Err()
	}
	if err != nil {
		return err
	}
	result := r.GetResult()
	must.Be(t, result.GetExitCode() == 0 && len(result.GetOutputFiles()) == 1, "action %d: response is %v, want one output", i, r)
	output := must.Get(cas.FromProto(cas.SHA256, result.OutputFiles[0].Digest))(t)
	expect.Equal(t, output, cas.SHA256.Sum([]byte(want)), "output of action %d", i)
	b, err := cas.ReadAll(ctx, f.client, output, 1<<10)
	expect.That(t, err != nil || string(b) == want, "action %d: output is %q, want %q", i, b, want)
	return err
}

// wantDivided checks that each shard has a part of the outputs of n actions.
func (f *shardedFarm) wantDivided(t *testing.T, n int) {
	t.Helper()
	var outputs []cas.Digest
	for i := range n {
		_, output := script(i)
		outputs = append(outputs, cas.SHA256.Sum([]byte(output)))
	}
	absent := 0
	for _, s := range f.shards {
		m := must.Get(dial(t, s, "").Missing(t.Context(), outputs))(t)
		expect.That(t, len(m) > 0 && len(m) < n, "a shard lacks %d of %d outputs, want a part", len(m), n)
		absent += len(m)
	}
	expect.Equal(t, absent, n, "outputs that the shards lack")
}
