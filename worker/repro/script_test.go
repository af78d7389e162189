// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A made is the result of a run: output files by path, and the rest.
type made struct {
	files          map[string]string
	stdout, stderr string
	exit           int32
	status         worker.Status
	directory      map[string]string // in the output directory "dir"
}

// A script is an Executor whose actions are functions of their conditions. It stores their outputs.
type script struct {
	t     *testing.T
	store *castest.Memory
	// act is the n-th run of an action, counted from 1.
	act func(n int, v *worker.Variation) made
	// wait, if not nil, blocks each run until the channel is closed or the run cancelled.
	wait func(n int) <-chan struct{}
	// idleChild adds an unused directory to Trees, as a server may.
	idleChild bool
	// toolchain, if not nil, returns the toolchain of the n-th run.
	toolchain func(n int) string
	// fail, if not nil, may return a fault instead of the outcome.
	fail func(n int) error

	mu       sync.Mutex
	tasks    []*worker.Task
	recorded int
}

func newScript(t *testing.T, act func(n int, v *worker.Variation) made) *script {
	return &script{t: t, store: castest.NewMemory(), act: act}
}

func (s *script) runs() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.tasks)
}

// Execute implements worker.Executor. It calls Task.Approve like a worker.
func (s *script) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	s.mu.Lock()
	s.tasks = append(s.tasks, t)
	n := len(s.tasks)
	s.mu.Unlock()
	if s.wait != nil {
		select {
		case <-s.wait(n):
		case <-ctx.Done():
			return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
		}
	}
	if s.fail != nil {
		if err := s.fail(n); err != nil {
			return nil, err
		}
	}
	v := t.Variation
	if v == nil {
		v = &worker.Variation{}
	}
	m := s.act(n, v)
	out := &worker.Outcome{Status: m.status, Uncacheable: t.Variation != nil, Result: &repb.ActionResult{
		ExitCode: m.exit, StdoutDigest: s.put(m.stdout), StderrDigest: s.put(m.stderr),
		ExecutionMetadata: &repb.ExecutedActionMetadata{
			Worker:                      "w",
			ExecutionStartTimestamp:     timestamppb.New(time.Unix(1_700_000_000, 0)),
			ExecutionCompletedTimestamp: timestamppb.New(time.Unix(1_700_000_001, 0)),
		},
	}}
	if s.toolchain != nil {
		aux, err := anypb.New(&cloisterpb.Execution{Toolchain: s.toolchain(n)})
		if err != nil {
			s.t.Error(err)
		}
		out.Result.ExecutionMetadata.AuxiliaryMetadata = []*anypb.Any{aux}
	}
	for _, p := range slices.Sorted(maps.Keys(m.files)) {
		out.Result.OutputFiles = append(out.Result.OutputFiles, &repb.OutputFile{
			Path: p, Digest: s.put(m.files[p]), IsExecutable: strings.HasSuffix(p, ".sh"),
		})
	}
	if m.directory != nil {
		d := &repb.Directory{}
		for _, p := range slices.Sorted(maps.Keys(m.directory)) {
			d.Files = append(d.Files, &repb.FileNode{Name: p, Digest: s.put(m.directory[p])})
		}
		tree := &repb.Tree{Root: d}
		if s.idleChild {
			tree.Children = []*repb.Directory{{}}
		}
		named, err := cas.PutProto(context.Background(), s.store, cas.SHA256, tree)
		if err != nil {
			s.t.Error(err)
		}
		out.Result.OutputDirectories = []*repb.OutputDirectory{{Path: "dir", TreeDigest: named.Proto()}}
	}
	if t.Variation == nil && m.exit == 0 && (t.Approve == nil || t.Approve(ctx, out)) {
		s.mu.Lock()
		s.recorded++
		s.mu.Unlock()
	}
	return out, nil
}

func (s *script) put(text string) *repb.Digest {
	d, err := cas.PutBytes(context.Background(), s.store, cas.SHA256, []byte(text))
	if err != nil {
		s.t.Error(err)
	}
	return d.Proto()
}

// action stores an action with variables and returns its task.
func (s *script) action(env ...string) *worker.Task {
	s.t.Helper()
	return s.actionOf([]string{"true"}, env...)
}

// actionOf is action for a command.
func (s *script) actionOf(args []string, env ...string) *worker.Task {
	s.t.Helper()
	command := &repb.Command{Arguments: args}
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		command.EnvironmentVariables = append(command.EnvironmentVariables, &repb.Command_EnvironmentVariable{Name: k, Value: v})
	}
	return s.actionWith(command, &repb.Directory{})
}

// actionWith is action for a command and an input root.
func (s *script) actionWith(command *repb.Command, root *repb.Directory) *worker.Task {
	s.t.Helper()
	action := &repb.Action{CommandDigest: s.putProto(command), InputRootDigest: s.putProto(root)}
	a := must.Get(cas.FromProto(cas.SHA256, s.putProto(action)))(s.t)
	return &worker.Task{Action: a, Target: "//a:b", Mnemonic: "Make"}
}

func (s *script) putProto(m proto.Message) *repb.Digest {
	s.t.Helper()
	d := must.Get(cas.PutProto(s.t.Context(), s.store, cas.SHA256, m))(s.t)
	return d.Proto()
}

// able are the features of a worker that supports every condition.
var able = &sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}, Conditions: sandbox.AllConditions}

var host = repro.Host{CPUs: 4, Zones: []string{"Etc/GMT-14", "Etc/GMT+12"}}

func (s *script) options() repro.Options {
	return repro.Options{Executors: []repro.Executor{{Name: "local", Executor: s, Store: s.store, Features: able}}, Factors: repro.AllFactors, Host: host, Pause: 1}
}

func check(t *testing.T, task *worker.Task, o repro.Options) *repro.Verdict {
	t.Helper()
	v := must.Get(repro.Check(t.Context(), task, o))(t)
	return v
}

// bisect checks the action of s and searches for the factors.
func bisect(t *testing.T, s *script) *repro.Verdict {
	t.Helper()
	o := s.options()
	o.Bisect = true
	return check(t, s.action(), o)
}

// file returns the result of a run that writes one file.
func file(text string) made { return made{files: map[string]string{"out": text}} }
