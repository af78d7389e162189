// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// callTime limits a call, which may wait while the server's store is not writable.
const callTime = time.Minute

// A load writes blobs and executes actions, and remembers what was acknowledged.
type load struct {
	t         *testing.T
	in        *cas.Instance
	execution repb.ExecutionClient
	want      map[bool]string // output of an action, with and without a tree of inputs

	mu              sync.Mutex
	acknowledged    []cas.Digest       // guarded by mu
	executed        int                // guarded by mu; correct results
	failed, refused map[codes.Code]int // guarded by mu; errors of writes, errors of actions
}

// dial connects to a server until the test ends, and keeps what earlier has acknowledged.
func dial(t *testing.T, address string, earlier *load) *load {
	t.Helper()
	server := must.Get(remote.Dial(t.Context(), "grpc://"+address))(t)
	t.Cleanup(func() { server.Close() })
	in := must.Get(server.Instance(""))(t)
	l := &load{
		t: t, in: in, execution: repb.NewExecutionClient(grpctest.Dial(t, address)),
		want: map[bool]string{}, failed: map[codes.Code]int{}, refused: map[codes.Code]int{},
	}
	if earlier != nil {
		l.want, l.acknowledged, l.executed, l.failed, l.refused = earlier.want, earlier.acknowledged, earlier.executed, earlier.failed, earlier.refused
	}
	return l
}

// put stores blobs and remembers them.
func (l *load) put(ctx context.Context, blobs ...[]byte) error {
	for _, b := range blobs {
		d, err := cas.PutBytes(ctx, l.in.Store, cas.SHA256, b)
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.acknowledged = append(l.acknowledged, d)
		l.mu.Unlock()
	}
	return nil
}

// script prints its input, everything that incomplete confinement would change, and its number.
const script = `cat in/file; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; id -u; hostname; ls -a; ls /
for f in in/file in/new /etc/new /new; do (echo x > $f) 2>&1; done; cat in/* > out; echo $N >> out`

// execute executes a new action and checks its result. With a tree, its inputs are read from a mounted image.
func (l *load) execute(ctx context.Context, tree bool) error {
	n := fmt.Sprint(rand.Uint64())
	files := 1
	if tree {
		files = 20
	}
	in := &repb.Directory{}
	for i := range files {
		b := []byte(fmt.Sprintf("input %d\n", i))
		if err := l.put(ctx, b); err != nil {
			return err
		}
		name := "file"
		if i > 0 {
			name = fmt.Sprintf("file%02d", i)
		}
		in.Files = append(in.Files, &repb.FileNode{Name: name, Digest: cas.SHA256.Sum(b).Proto()})
	}
	inDigest, err := l.message(ctx, in)
	if err != nil {
		return err
	}
	root, err := l.message(ctx, &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "in", Digest: inDigest.Proto()}}})
	if err != nil {
		return err
	}
	command, err := l.message(ctx, &repb.Command{
		Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"out"},
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "N", Value: n}, {Name: "PATH", Value: "/usr/bin:/bin"}},
	})
	if err != nil {
		return err
	}
	action, err := l.message(ctx, &repb.Action{CommandDigest: command.Proto(), InputRootDigest: root.Proto()})
	if err != nil {
		return err
	}
	stream, err := l.execution.Execute(ctx, &repb.ExecuteRequest{ActionDigest: action.Proto()})
	if err != nil {
		return err
	}
	for {
		op, err := stream.Recv()
		if err == io.EOF {
			return status.Error(codes.Unknown, "the stream ended without a response")
		} else if err != nil {
			return err
		}
		if op.Done {
			answer := &repb.ExecuteResponse{}
			if err := op.GetResponse().UnmarshalTo(answer); err != nil {
				return err
			}
			return l.check(ctx, answer, tree)
		}
	}
}

func (l *load) message(ctx context.Context, m proto.Message) (cas.Digest, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return cas.Digest{}, err
	}
	return cas.SHA256.Sum(b), l.put(ctx, b)
}

// check checks a response, and remembers the output of a success.
func (l *load) check(ctx context.Context, answer *repb.ExecuteResponse, tree bool) error {
	if err := status.FromProto(answer.Status).Err(); err != nil {
		return err
	}
	r := answer.Result
	text := r.GetStdoutRaw()
	if len(text) == 0 && r.GetStdoutDigest() != nil {
		d, err := cas.FromProto(cas.SHA256, r.StdoutDigest)
		if err == nil {
			text, err = cas.ReadAll(ctx, l.in.Store, d, 1<<20)
		}
		if err != nil {
			return err
		}
	}
	if r.ExitCode != 0 || len(r.OutputFiles) != 1 {
		l.t.Errorf("wrong result: %v, output %q, message %q", r, text, answer.Message)
		return nil
	}
	d := must.Get(cas.FromProto(cas.SHA256, r.OutputFiles[0].Digest))(l.t)
	l.mu.Lock()
	defer l.mu.Unlock()
	if want, ok := l.want[tree]; !ok {
		l.want[tree] = string(text)
	} else if string(text) != want {
		l.t.Errorf("wrong output: got %q, want %q; message %q", text, want, answer.Message)
	}
	l.acknowledged = append(l.acknowledged, d)
	l.executed++
	return nil
}

// run loads the server until ctx ends. A call that has begun ends later.
func (l *load) run(ctx context.Context) {
	var group sync.WaitGroup
	repeat := func(f func(context.Context, *rand.Rand) error, errors map[codes.Code]int) {
		group.Go(func() {
			random := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
			for ctx.Err() == nil {
				call, cancel := context.WithTimeout(l.t.Context(), callTime)
				err := f(call, random)
				cancel()
				l.note(err, errors)
			}
		})
	}
	blobs := func(ctx context.Context, random *rand.Rand) error {
		b := make([]byte, 1+random.IntN(150_000)>>random.IntN(8))
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return l.put(ctx, b)
	}
	repeat(blobs, l.failed)
	for range 2 {
		repeat(func(ctx context.Context, random *rand.Rand) error { return l.execute(ctx, random.IntN(2) == 0) }, l.refused)
	}
	group.Wait()
}

// note counts an error, which must be a clean one.
func (l *load) note(err error, errors map[codes.Code]int) {
	if err == nil {
		return
	}
	code := status.Code(err)
	if isCAS := code == codes.Unknown && !strings.Contains(err.Error(), "code = Unknown"); isCAS {
		code = codes.OK // an error of package cas, from a status that it knows
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if errors[code]++; code == codes.Unknown || code == codes.FailedPrecondition {
		l.t.Errorf("unclear error: %v", err)
	}
}

// wantRecovered checks that writes and actions succeed again.
func (l *load) wantRecovered(ctx context.Context) error {
	var err error
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		call, cancel := context.WithTimeout(ctx, callTime)
		if err = l.execute(call, true); err == nil {
			err = l.execute(call, false)
		}
		cancel()
		if err == nil {
			return nil
		}
	}
	return err
}

// wantAcknowledged checks that the server has everything that was acknowledged.
func (l *load) wantAcknowledged() {
	l.t.Helper()
	absent, err := l.in.Store.Missing(l.t.Context(), l.acknowledged)
	if err != nil || len(absent) > 0 {
		l.t.Errorf("%d of %d acknowledged blobs are absent: %v, %v", len(absent), len(l.acknowledged), absent[:min(5, len(absent))], err)
	}
	for range 50 {
		d := l.acknowledged[rand.IntN(len(l.acknowledged))]
		if _, err := cas.ReadAll(l.t.Context(), l.in.Store, d, 1<<20); err != nil {
			l.t.Errorf("read %v: %v", d, err)
		}
	}
}
