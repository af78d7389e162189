// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// ExecConfig says what Execute measures.
type ExecConfig struct {
	Salt     string // of the actions and their inputs
	Works    []Work
	Rounds   int                       // how often each work is done, with other actions each time
	Platform []*repb.Platform_Property // of every action
	// LocalTime is how long this machine itself is measured at once. It works in Dir, where nothing stays; "" is where
	// temporary files are.
	LocalTime time.Duration
	Dir       string
	// Progress is told before each work of each round, the first of which is 1, and may be nil.
	Progress func(round int, w *Work)
}

// patience is how long actions may be in flight without that one of them ends.
const patience = 5 * time.Minute

// Execute has servers execute works, and compares each with this machine, which does the same without a server, and
// starts processes. They take turns, work by work. Everything that actions need is uploaded before the clock starts. It
// ends with the first action that fails, or whose result is not what it must be.
func Execute(ctx context.Context, c ExecConfig, servers []*Server) (*ExecReport, error) {
	report := newExecReport(&c, servers)
	for round := range c.Rounds {
		for n := range c.Works {
			w := &c.Works[n]
			if c.Progress != nil {
				c.Progress(round+1, w)
			}
			j, err := newJob(w, platformOf(c.Platform), fmt.Sprintf("%s/%d/%d", c.Salt, n, round))
			if err != nil {
				return nil, err
			}
			m := &report.Works[n]
			turns := []func() error{func() error { return m.Local.measure(ctx, w, j, &c) }}
			for i, s := range servers {
				turns = append(turns, func() error {
					if err := m.Servers[i].measure(ctx, w, j, s, servers); err != nil {
						return fmt.Errorf("%s: %s: %w", s.Name, w.Kind, err)
					}
					return nil
				})
			}
			// Nobody is always the first.
			for turn := range turns {
				if err := turns[(turn+round)%len(turns)](); err != nil {
					return nil, err
				}
			}
		}
	}
	report.conclude()
	return report, nil
}

// An answer is what came of the request for one action.
type answer struct {
	took time.Duration
	last reply // the last message of the stream
}

// measure has s execute the actions of a job, checks all results, and adds what it took.
func (r *ExecResult) measure(ctx context.Context, w *Work, j *job, s *Server, servers []*Server) error {
	requests, err := s.executeRequests(j.actions)
	if err != nil {
		return err
	}
	if err := s.upload(ctx, j); err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	// Not a deadline for each action: the server would be told of it, and keep the time as well.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	idle := time.AfterFunc(patience, func() { cancel(fmt.Errorf("no action has ended for %s", patience)) })
	defer idle.Stop()
	answers := make([]answer, len(requests))
	do := func(ctx context.Context, i int) (err error) {
		answers[i], err = s.execute(ctx, requests[i])
		if err != nil {
			return fmt.Errorf("action %s: %w", j.actions[i].name(), cmp.Or(context.Cause(ctx), err))
		}
		idle.Reset(patience)
		return nil
	}
	// The first two go alone: one finds the tree that no action has had before, the other has seen it.
	const alone = 2
	for i := range alone {
		if err := do(ctx, i); err != nil {
			return err
		}
	}
	runtime.GC()
	before, err := s.observe(servers)
	if err != nil {
		return err
	}
	start := time.Now()
	err = each(ctx, w.Parallel, w.Actions, func(ctx context.Context, i int) error { return do(ctx, alone+i) })
	elapsed := time.Since(start)
	if err != nil {
		return err
	}
	after, err := s.observe(servers)
	if err != nil {
		return err
	}
	metadata, err := s.checkAll(ctx, j, answers)
	if err != nil {
		return err
	}
	r.add(answers[:alone], answers[alone:], metadata[alone:], elapsed, before, after)
	return nil
}

// name returns the digest of an action as messages have it.
func (a *action) name() string { return fmt.Sprintf("%s/%d", a.digest.hash, len(a.digest.data)) }

// executeRequests returns the requests for actions.
func (s *Server) executeRequests(actions []action) ([]message, error) {
	requests := make([]message, len(actions))
	for i := range actions {
		b, err := proto.Marshal(&repb.ExecuteRequest{
			InstanceName: s.execInstance, ActionDigest: actions[i].digest.digest(), SkipCacheLookup: true,
		})
		if err != nil {
			return nil, err
		}
		requests[i] = message{b}
	}
	return requests, nil
}

// upload writes all blobs of a job that the server lacks.
func (s *Server) upload(ctx context.Context, j *job) error {
	missing, err := s.missing(ctx, slices.Collect(maps.Keys(j.blobs)), func(h string) int64 { return int64(len(j.blobs[h].data)) })
	if err != nil {
		return err
	}
	slices.SortFunc(missing, func(a, b string) int { return len(j.blobs[a].data) - len(j.blobs[b].data) })
	limit := min(s.batch, maxMessage-1<<16)
	update := &repb.BatchUpdateBlobsRequest{InstanceName: s.instance}
	var part, large []blob
	size := int64(0)
	flush := func() error {
		if len(part) == 0 {
			return nil
		}
		answer, err := repb.NewContentAddressableStorageClient(s.conn).BatchUpdateBlobs(ctx, update)
		if err != nil {
			return err
		}
		err = checkBatch(part, answer.Responses, func(*repb.BatchUpdateBlobsResponse_Response, blob) bool { return true })
		update.Requests, part, size = nil, nil, 0
		return err
	}
	for _, hash := range missing {
		b := j.blobs[hash]
		takes := int64(len(b.data)) + entryBytes
		if takes > limit {
			large = append(large, b)
			continue
		}
		if size+takes > limit {
			if err := flush(); err != nil {
				return err
			}
		}
		update.Requests = append(update.Requests, &repb.BatchUpdateBlobsRequest_Request{Digest: b.digest(), Data: b.data})
		part, size = append(part, b), size+takes
	}
	if err := flush(); err != nil {
		return err
	}
	check, err := s.writes(&Config{Chunk: 1 << 20, Parallel: 1}, large)(ctx)
	if err != nil {
		return err
	}
	return check()
}

// missing returns those of blobs, named by their hashes, that the server does not have.
func (s *Server) missing(ctx context.Context, hashes []string, size func(hash string) int64) ([]string, error) {
	var missing []string
	for part := range slices.Chunk(hashes, asked) {
		q := &repb.FindMissingBlobsRequest{InstanceName: s.instance}
		for _, h := range part {
			q.BlobDigests = append(q.BlobDigests, &repb.Digest{Hash: h, SizeBytes: size(h)})
		}
		a, err := repb.NewContentAddressableStorageClient(s.conn).FindMissingBlobs(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, d := range a.MissingBlobDigests {
			missing = append(missing, d.Hash)
		}
	}
	return missing, nil
}

// execute executes one action, and returns the last message when the stream has ended.
func (s *Server) execute(ctx context.Context, request message) (a answer, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	start := time.Now()
	stream, err := s.exec.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, repb.Execution_Execute_FullMethodName, raw)
	if err != nil {
		return a, err
	}
	if err := stream.SendMsg(request); err != nil {
		return a, err
	}
	if err := stream.CloseSend(); err != nil {
		return a, err
	}
	for {
		var r reply
		if err := stream.RecvMsg(&r); err == io.EOF {
			a.took = time.Since(start)
			return a, nil
		} else if err != nil {
			return a, err
		}
		a.last.free()
		a.last = r
	}
}

// checkAll compares the results of all actions with what they must be, and looks whether the server has their outputs.
// It frees the answers.
func (s *Server) checkAll(ctx context.Context, j *job, answers []answer) ([]*repb.ExecutedActionMetadata, error) {
	metadata := make([]*repb.ExecutedActionMetadata, len(answers))
	stored := map[string]output{}
	for i := range answers {
		a := &j.actions[i]
		encoded := answers[i].last.bytes()
		answers[i].last.free()
		result, err := resultOf(encoded)
		if err == nil {
			err = s.check(ctx, a, result, func(d *repb.Digest) { stored[d.GetHash()] = output{d.GetSizeBytes(), a} })
		}
		if err != nil {
			return nil, fmt.Errorf("action %s: %w", a.name(), err)
		}
		metadata[i] = result.ExecutionMetadata
	}
	missing, err := s.missing(ctx, slices.Collect(maps.Keys(stored)), func(h string) int64 { return stored[h].size })
	if err == nil && len(missing) > 0 {
		b := stored[missing[0]]
		err = fmt.Errorf("action %s: output blob %s/%d is absent from the store, as are %d of %d of all actions",
			b.of.name(), missing[0], b.size, len(missing), len(stored))
	}
	return metadata, err
}

// An output is a blob that an action has made.
type output struct {
	size int64
	of   *action
}

// resultOf returns the result that the last message of an execution holds.
func resultOf(encoded []byte) (*repb.ActionResult, error) {
	var op longrunningpb.Operation
	if err := proto.Unmarshal(encoded, &op); err != nil {
		return nil, err
	}
	if err := status.FromProto(op.GetError()).Err(); err != nil {
		return nil, err
	}
	if !op.Done {
		return nil, errors.New("the stream ends before the operation does")
	}
	var r repb.ExecuteResponse
	if err := op.GetResponse().UnmarshalTo(&r); err != nil {
		return nil, err
	}
	if err := status.FromProto(r.Status).Err(); err != nil {
		return nil, err
	}
	if r.CachedResult {
		return nil, errors.New("the result is from the cache, though the request says that it must not be")
	}
	if r.Result == nil {
		return nil, errors.New("there is no result")
	}
	return r.Result, nil
}

// check compares the result of an action, and tells stored which blobs of it the server must have.
func (s *Server) check(ctx context.Context, a *action, r *repb.ActionResult, stored func(*repb.Digest)) error {
	if r.ExitCode != 0 {
		return fmt.Errorf("exit code %d, stderr %+.1000q", r.ExitCode, r.StderrRaw)
	}
	switch want := []byte(a.stdout); {
	case len(r.StdoutRaw) > 0 && !bytes.Equal(r.StdoutRaw, want):
		return fmt.Errorf("stdout is %+.256q, want %+.256q", r.StdoutRaw, want)
	case len(r.StdoutRaw) == 0 && len(want) > 0:
		if r.StdoutDigest.GetHash() != hash(want) {
			return fmt.Errorf("stdout has digest %s/%d, want that of %+.256q", r.StdoutDigest.GetHash(), r.StdoutDigest.GetSizeBytes(), want)
		}
		stored(r.StdoutDigest)
	case len(want) == 0 && r.StdoutDigest.GetSizeBytes() > 0:
		return fmt.Errorf("stdout has %d bytes, want none", r.StdoutDigest.SizeBytes)
	}
	files := map[string]string{}
	for _, f := range r.OutputFiles {
		files[f.Path] = f.Digest.GetHash()
		stored(f.Digest)
	}
	if err := compareFiles(files, a.files); err != nil {
		return err
	}
	if links := len(r.OutputSymlinks) + len(r.OutputFileSymlinks) + len(r.OutputDirectorySymlinks); links > 0 {
		return fmt.Errorf("there are %d symbolic links among the outputs, want none", links)
	}
	if a.dir == nil || len(r.OutputDirectories) != 1 || r.OutputDirectories[0].Path != "d" {
		if a.dir == nil && len(r.OutputDirectories) == 0 {
			return nil
		}
		return fmt.Errorf("output directories are %v, want the one that the action declares", r.OutputDirectories)
	}
	return s.checkTree(ctx, a, r.OutputDirectories[0].TreeDigest, stored)
}

// checkTree compares the output directory of an action.
func (s *Server) checkTree(ctx context.Context, a *action, d *repb.Digest, stored func(*repb.Digest)) error {
	request, err := s.readRequest(fmt.Sprintf("blobs/%s/%d", d.GetHash(), d.GetSizeBytes()))
	if err != nil {
		return err
	}
	var data []byte
	var replies []reply
	err = s.read(ctx, request, func(r reply) error {
		replies = append(replies, r)
		return nil
	})
	if err == nil {
		data, err = io.ReadAll(&pieces{replies: replies})
	}
	if err == nil && hash(data) != d.GetHash() {
		err = errors.New("the server sends bytes of another digest")
	}
	var tree repb.Tree
	if err == nil {
		err = proto.Unmarshal(data, &tree)
	}
	if err != nil {
		return fmt.Errorf("output directory d, tree %s/%d: %w", d.GetHash(), d.GetSizeBytes(), err)
	}
	files := map[string]string{}
	for _, f := range tree.Root.GetFiles() {
		files["d/"+f.Name] = f.Digest.GetHash()
		stored(f.Digest)
	}
	if n := len(tree.Root.GetDirectories()) + len(tree.Root.GetSymlinks()); n > 0 {
		return fmt.Errorf("output directory d has %d entries that are no files, want none", n)
	}
	return compareFiles(files, a.dir)
}

// compareFiles returns the first difference between digests by path.
func compareFiles(got, want map[string]string) error {
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if h, ok := got[path]; !ok {
			return fmt.Errorf("output %s is absent", path)
		} else if h != want[path] {
			return fmt.Errorf("output %s has digest %s, want %s", path, h, want[path])
		}
	}
	for _, path := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[path]; !ok {
			return fmt.Errorf("output %+.256q is there, which the action does not write", path)
		}
	}
	return nil
}

// phasesOf returns how long the parts of an execution took, the last of which is the rest.
func phasesOf(m *repb.ExecutedActionMetadata, took time.Duration) Phases {
	span := func(from, to *timestamppb.Timestamp) float64 {
		if from == nil || to == nil {
			return 0
		}
		return milliseconds(to.AsTime().Sub(from.AsTime()))
	}
	p := Phases{
		Queue:  span(m.GetQueuedTimestamp(), m.GetWorkerStartTimestamp()),
		Fetch:  span(m.GetInputFetchStartTimestamp(), m.GetInputFetchCompletedTimestamp()),
		Run:    span(m.GetExecutionStartTimestamp(), m.GetExecutionCompletedTimestamp()),
		Upload: span(m.GetOutputUploadStartTimestamp(), m.GetOutputUploadCompletedTimestamp()),
	}
	p.Rest = milliseconds(took) - p.Queue - p.Fetch - p.Run - p.Upload
	return p
}

// An observation is what processes have used up to a moment.
type observation struct {
	usage
	// Of the server's processes and all below them: of those that live, and of those that have ended.
	living, ended time.Duration
	self          time.Duration // of this process
	machine       time.Duration // of everything
	known         time.Duration // of all servers that are watched, and of this process
}

// observe looks at the server and at the machine, as far as the operating system says.
func (s *Server) observe(servers []*Server) (observation, error) {
	var o observation
	var err error
	if o.usage, err = s.usage(); err != nil {
		return o, err
	}
	if o.living, o.ended, err = families(s.pids); err != nil {
		return o, err
	}
	var children time.Duration
	o.self, children = ownCPU()
	if o.machine, err = machineCPU(); errors.Is(err, errors.ErrUnsupported) {
		return o, nil
	} else if err != nil {
		return o, err
	}
	var all []int
	for _, s := range servers {
		all = append(all, s.pids...)
	}
	living, ended, err := families(all)
	o.known = living + ended + o.self + children
	return o, err
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// String says what a work is.
func (w *Work) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ", w.Kind)
	files := func() {
		size := bytesText(w.Tree.Smallest)
		if w.Tree.Largest > w.Tree.Smallest {
			size += " to " + bytesText(w.Tree.Largest)
		}
		fmt.Fprintf(&b, "%d files of %s in %d directories, %d of them changed by each action", w.Tree.Files, size, w.Tree.Dirs, w.Tree.Changed)
	}
	switch w.Kind {
	case Noop:
		b.WriteString(w.Program)
	case Trees:
		files()
		if w.Tree.Read {
			b.WriteString(", all read")
		} else {
			b.WriteString(", not read")
		}
	case Outputs:
		fmt.Fprintf(&b, "%d files of 1 KiB, and a directory of %d", w.Files, w.Inner)
	case Mixed:
		fmt.Fprintf(&b, "3 of 5 %s, 1 reads ", w.Program)
		files()
		fmt.Fprintf(&b, ", 1 writes %d files of 1 KiB and a directory of %d", w.Files, w.Inner)
	}
	fmt.Fprintf(&b, "; %d actions, %d in flight", w.Actions, w.Parallel)
	return b.String()
}

func bytesText(n int64) string {
	if n%1024 == 0 {
		return fmt.Sprintf("%d KiB", n/1024)
	}
	return fmt.Sprintf("%d bytes", n)
}
