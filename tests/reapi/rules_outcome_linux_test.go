// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	headers "google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func exactStreams(c *client) {
	r := c.run(job{steps: []string{"bytes 6100ff620d0a", "ebytes 65fe72", "exit 7"}})
	stdout, stderr := c.stdout(r.Result), c.output(r.Result.GetStderrRaw(), r.Result.GetStderrDigest())
	expect.That(c, stdout == "a\x00\xffb\r\n" && stderr == "e\xfer" && r.Result.GetExitCode() == 7,
		"got exit code %d, stdout %q, stderr %q", r.Result.GetExitCode(), stdout, stderr)
	const line = "0123456789abcde\n"
	stdout, _ = c.succeed(job{steps: []string{"repeat 500000 " + line}})
	if want := strings.Repeat(line, 500_000); stdout != want {
		c.Errorf("8 MB of stdout: got %d bytes or other ones, want %d", len(stdout), len(want))
	}
	_, result := c.succeed(job{steps: []string{"bytes "}})
	if c.ours && (result.GetStdoutDigest().GetHash() != cas.SHA256.Sum(nil).Hash() || result.GetStderrDigest() == nil) {
		c.Errorf("no output: got digests %v and %v, want those of the empty blob", result.GetStdoutDigest(), result.GetStderrDigest())
	}
	stdout, _ = c.succeed(job{steps: []string{"repeat 2500000 " + line}})
	whole := strings.Repeat(line, 2_500_000)
	kept := 0
	for kept < len(stdout) && kept < len(whole) && stdout[kept] == whole[kept] {
		kept++
	}
	if stdout == whole {
		return
	}
	c.Logf("40 MB of stdout: kept %d bytes, then %q", kept, stdout[kept:min(len(stdout), kept+200)])
	expect.That(c, kept >= 1<<20 && len(stdout) != kept && len(stdout) <= kept+1000,
		"40 MB of stdout: got %d bytes with %d correct ones, want all, or a notice", len(stdout), kept)
}

// blobsOf returns the blobs that a result refers to, including those of its Trees.
func (c *client) blobsOf(r *repb.ActionResult) (all []*repb.Digest) {
	c.Helper()
	for _, f := range r.GetOutputFiles() {
		all = append(all, f.GetDigest())
	}
	for _, d := range []*repb.Digest{r.GetStdoutDigest(), r.GetStderrDigest()} {
		if d != nil {
			all = append(all, d)
		}
	}
	for _, o := range r.GetOutputDirectories() {
		all = append(all, o.GetTreeDigest())
		t := c.decodeTree(o.GetTreeDigest())
		for _, d := range append(t.GetChildren(), t.GetRoot()) {
			for _, f := range d.GetFiles() {
				all = append(all, f.GetDigest())
			}
		}
	}
	return all
}

func completeResult(c *client) {
	for range 5 {
		d := c.prepare(job{
			steps:   []string{"mkdirs d/e", "random 100 a", "random 2000000 b", "random 1000 d/c", "random 300000 d/e/f", "say x", "ebytes 65"},
			outputs: []string{"a", "b", "d"},
		})
		_, r := c.wantSuccess("an action with outputs", c.request(d, nil))
		blobs := c.blobsOf(r)
		missing, err := c.absent(c.Context(), blobs...)
		expect.That(c, err == nil && len(missing) == 0 && len(blobs) >= 7,
			"action with %d blobs: when done, %v were missing, %v", len(blobs), missing, err)
		got, err := c.recorded(d)
		expect.That(c, err == nil && proto.Equal(got, r),
			"action cache when an action was done: got %v, %v, want %v", got, err, r)
	}
	if c.ours {
		// Outputs that do not fit must not become a result.
		c.executeInSmallStore(func(what string, _ *repb.Digest, a *answer) {
			expect.That(c, a.err != nil && a.response.GetResult() == nil,
				"%s: got %v, %v, want an error and no result", what, a.err, a.response.GetResult())
		})
	}
}

func recordedResults(c *client) {
	fine := c.prepare(job{steps: []string{"write out 1"}, outputs: []string{"out"}})
	_, r := c.wantSuccess("a success", c.request(fine, nil))
	if got, err := c.recorded(fine); err != nil || !proto.Equal(got, r) {
		c.Errorf("a success: the action cache has %v, %v, want %v", got, err, r)
	}
	bad := c.prepare(job{steps: []string{"write out 1", "exit 5"}, outputs: []string{"out"}})
	if r := c.wantResult("a failure", c.request(bad, nil)); r.Result.GetExitCode() != 5 || len(r.Result.GetOutputFiles()) != 1 {
		c.Errorf("a failure: got %v, want exit code 5 and its output", r.Result)
	}
	c.notRecorded("a failure", bad)
	if r := c.wantResult("a failure again", c.request(bad, nil)); r.GetCachedResult() {
		c.Error("a failure was served from the action cache")
	}
	private := c.prepare(job{steps: []string{"write out 1"}, outputs: []string{"out"}, change: func(a *repb.Action) { a.DoNotCache = true }})
	c.wantSuccess("do_not_cache", c.request(private, nil))
	c.notRecorded("do_not_cache", private)
}

func executionMetadata(c *client) {
	before := time.Now()
	clock, r := c.succeed(job{steps: []string{"sleep 20ms", "clock", "write out 1"}, outputs: []string{"out"}})
	m := r.GetExecutionMetadata()
	expect.That(c, m.GetWorker() != "", "no worker name: %v", m)
	times := []struct {
		name string
		at   *timestamppb.Timestamp
	}{
		{"queued", m.GetQueuedTimestamp()},
		{"worker_start", m.GetWorkerStartTimestamp()},
		{"input_fetch_start", m.GetInputFetchStartTimestamp()},
		{"input_fetch_completed", m.GetInputFetchCompletedTimestamp()},
		{"execution_start", m.GetExecutionStartTimestamp()},
		{"execution_completed", m.GetExecutionCompletedTimestamp()},
		{"output_upload_start", m.GetOutputUploadStartTimestamp()},
		{"output_upload_completed", m.GetOutputUploadCompletedTimestamp()},
		{"worker_completed", m.GetWorkerCompletedTimestamp()},
	}
	for i, t := range times {
		switch {
		case t.at == nil || t.at.AsTime().Unix() == 0:
			c.Errorf("%s_timestamp is not set", t.name)
		case i > 0 && t.at.AsTime().Before(times[i-1].at.AsTime()):
			c.Errorf("%s_timestamp %v is before %s_timestamp %v", t.name, t.at.AsTime(), times[i-1].name, times[i-1].at.AsTime())
		}
	}
	if q := m.GetQueuedTimestamp().AsTime(); q.Sub(before).Abs() > 24*time.Hour {
		c.Errorf("queued_timestamp: got %v, want about %v", q, before)
	}
	started, completed := m.GetExecutionStartTimestamp().AsTime(), m.GetExecutionCompletedTimestamp().AsTime()
	// A server measures with a monotonic clock, which a correction of the wall clock does not change.
	ns, err := strconv.ParseInt(strings.TrimSpace(clock), 10, 64)
	if ran := time.Unix(0, ns).UTC(); err != nil || ran.Before(started.Add(-time.Millisecond)) || ran.After(completed.Add(time.Millisecond)) {
		c.Errorf("the command ran at %v, %v; want a time from execution_start %v to execution_completed %v",
			ran, err, started, completed)
	}
	if wall, v := completed.Sub(started), m.GetVirtualExecutionDuration().AsDuration(); v > wall || v < 0 {
		c.Errorf("virtual execution time: got %v, want at most the execution time %v", v, wall)
	}
	for _, a := range m.GetAuxiliaryMetadata() {
		expect.That(c, a.GetTypeUrl() != "", "auxiliary metadata without a type: %v", a)
	}
	if c.ours {
		c.ownMetadata(m)
	}
}

// ownMetadata checks the metadata that our server adds.
func (c *client) ownMetadata(m *repb.ExecutedActionMetadata) {
	c.Helper()
	must.Be(c, len(m.GetAuxiliaryMetadata()) == 2,
		"auxiliary metadata: got %v, want an Execution and a POSIXResourceUsage", m.GetAuxiliaryMetadata())
	var x cloisterpb.Execution
	must.Succeed(c, m.AuxiliaryMetadata[0].UnmarshalTo(&x))
	tier := "full"
	if len(x.Sandbox.GetNotEnforced()) > 0 {
		tier = "partial"
	}
	if x.Sandbox.GetTier() != tier || len(x.Sandbox.GetLayers()) == 0 || x.SpecHash == "" || x.Usage.GetPeakResidentBytes() == 0 {
		c.Errorf("auxiliary metadata: got %v", &x)
	}
	// For Buildbarn's browser.
	var posix resourceusagepb.POSIXResourceUsage
	if err := m.AuxiliaryMetadata[1].UnmarshalTo(&posix); err != nil || posix.MaximumResidentSetSize == 0 {
		c.Errorf("resource usage: got %v, %v", &posix, err)
	}
}

func keptMetadata(c *client) {
	d := c.prepare(job{steps: []string{"write out 1"}, outputs: []string{"out"}})
	_, first := c.wantSuccess("the first", c.request(d, nil))
	second := c.wantResult("the second", c.request(d, nil))
	if !second.GetCachedResult() || !proto.Equal(second.Result.GetExecutionMetadata(), first.GetExecutionMetadata()) {
		c.Errorf("the second execution: got cached_result=%v and metadata %v, want %v of the first", second.GetCachedResult(), second.Result.GetExecutionMetadata(), first.GetExecutionMetadata())
	}
	if got, err := c.recorded(d); err != nil || !proto.Equal(got.GetExecutionMetadata(), first.GetExecutionMetadata()) {
		c.Errorf("GetActionResult: got metadata %v, %v, want %v", got.GetExecutionMetadata(), err, first.GetExecutionMetadata())
	}
	answers := c.atOnce(c.prepare(job{steps: []string{"sleep 1s", "random 100 out"}, outputs: []string{"out"}}), 2)
	a, b := c.wantResult("one", answers[0]), c.wantResult("other", answers[1])
	x, _ := encoded(c, a.Result)
	if y, _ := encoded(c, b.Result); !bytes.Equal(x, y) {
		c.Errorf("merged executions: got results %v and %v, want the same", a.Result, b.Result)
	}
}

func neverEmpty(c *client) {
	d := c.prepare(job{steps: []string{"bytes "}})
	r := c.wantResult("an action that does nothing", c.request(d, nil))
	expect.That(c, proto.Size(r.Result) != 0, "an action that does nothing: got an empty result")
	if got, err := c.recorded(d); err != nil || proto.Size(got) == 0 {
		c.Errorf("GetActionResult of an action that does nothing: got %v, %v, want one with a field set", got, err)
	}
	// Siso rejects a success without any output.
	r = c.run(job{steps: []string{"bytes "}, outputs: []string{"never", "nowhere"}})
	expect.Equal(c, r.Result.GetExitCode(), 0, "a success without its outputs: exit code")
	if c.ours && !strings.Contains(r.GetMessage(), "output") {
		c.Errorf("a success without any of its outputs: got message %q, want a warning", r.GetMessage())
	}
}

func inlinedOutputs(c *client) {
	d := c.prepare(job{
		steps:   []string{"say on stdout", "ebytes 6f6e20737464657272", "write small inlined", "random 3000000 large", "random 3000000 larger"},
		outputs: []string{"large", "larger", "small"},
	})
	ask := func(r *repb.ExecuteRequest) {
		r.InlineStdout, r.InlineStderr, r.InlineOutputFiles = true, true, []string{"small", "large", "larger"}
	}
	for _, what := range []string{"a run", "a hit"} {
		a := c.request(d, ask)
		r := c.wantResult(what, a)
		if n := proto.Size(a.ops[len(a.ops)-1]); n > 4<<20 {
			c.Errorf("%s: got a last message of %d bytes, want at most 4 MiB", what, n)
		}
		if got := c.stdout(r.Result); got != "on stdout\n" || c.ours && len(r.Result.GetStdoutRaw()) == 0 {
			c.Errorf("%s: got stdout %q, inline %q", what, got, r.Result.GetStdoutRaw())
		}
		if c.ours && string(r.Result.GetStderrRaw()) != "on stderr" {
			c.Errorf("%s: got stderr %q inline", what, r.Result.GetStderrRaw())
		}
		for _, f := range r.Result.GetOutputFiles() {
			if len(f.GetContents()) > 0 && string(f.GetContents()) != c.get(f.GetDigest()) {
				c.Errorf("%s: the contents of %s do not match its digest", what, f.GetPath())
			}
			expect.That(c, f.GetDigest() != nil, "%s: %s has no digest", what, f.GetPath())
			if c.ours && f.GetPath() == "small" && string(f.GetContents()) != "inlined" {
				c.Errorf("%s: small has the contents %q", what, f.GetContents())
			}
		}
	}
	// 20,000 outputs are within the limit and must all be reported.
	var outputs []string
	for i := range 20_000 {
		outputs = append(outputs, fmt.Sprintf("d/%d", i))
	}
	slices.Sort(outputs)
	d = c.prepare(job{steps: []string{"files 20000 d"}, outputs: outputs})
	a := c.request(d, func(r *repb.ExecuteRequest) { r.InlineOutputFiles = outputs })
	_, r := c.wantSuccess("20,000 outputs", a)
	if n := proto.Size(a.ops[len(a.ops)-1]); len(r.GetOutputFiles()) != 20_000 || n > 4<<20 {
		c.Errorf("got %d of 20,000 outputs in %d bytes", len(r.GetOutputFiles()), n)
	}
}

func serverLogs(c *client) {
	steps := []string{"dial 192.0.2.1:80", "exit 1"}
	r := c.run(job{steps: steps})
	if c.ours && len(r.GetServerLogs()) == 0 {
		c.Error("an action that tried to reach the network has no server log")
	}
	for name, l := range r.GetServerLogs() {
		text := c.get(l.GetDigest()) // fails if it is absent
		if c.ours && (!l.GetHumanReadable() || !strings.Contains(text, "192.0.2.1")) {
			c.Errorf("server log %s: human_readable=%v, %q", name, l.GetHumanReadable(), text)
		}
	}
}

func messages(c *client) {
	var small *answer
	c.executeInSmallStore(func(what string, d *repb.Digest, a *answer) {
		small = a
		for _, part := range []string{"worker", "operation " + a.name(), "action", d.GetHash()} {
			expect.Text(c, a.response.GetMessage(), part, "%s", what)
		}
	})
	failed := c.run(job{steps: []string{"exit 4"}})
	if text := failed.GetMessage(); !strings.Contains(text, "exit code 4") || !strings.Contains(text, "cloister run --action") {
		c.Errorf("a failure: got message %q, want the exit code and how to run it again", text)
	}
	for _, text := range []string{small.response.GetMessage(), failed.GetMessage()} {
		if n := strings.Count(text, "\n"); n > 10 || len(text) > 10_000 {
			c.Errorf("a message has %d lines and %d bytes", n+1, len(text))
		}
	}
}

func liveOutput(c *client) {
	d := c.prepare(job{steps: []string{"say first", "ebytes 6c6f67", "sleep 4s", "say last"}})
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	s := must.Get(c.open(ctx, d, nil))(c)
	var stdout, stderr string
	for stdout == "" {
		op, err := s.Recv()
		must.Be(c, err == nil, "before a stream name was reported: %v", err)
		m := must.Get(stageOf(op))(c)
		if op.GetDone() {
			c.Skip("stdout_stream_name")
		}
		stdout, stderr = m.GetStdoutStreamName(), m.GetStderrStreamName()
	}
	type read struct {
		text string
		err  error
	}
	whole := make(chan read, 2)
	firstLine := make(chan error, 1)
	for _, name := range []string{stdout, stderr} {
		go func() {
			var text []byte
			r, err := c.bs.Read(ctx, &bspb.ReadRequest{ResourceName: name})
			for found := false; err == nil; {
				var m *bspb.ReadResponse
				if m, err = r.Recv(); err == nil {
					text = append(text, m.GetData()...)
				}
				if name == stdout && !found && (err != nil || bytes.Contains(text, []byte("first\n"))) {
					found = true
					firstLine <- err
				}
			}
			if errors.Is(err, io.EOF) {
				err = nil
			}
			whole <- read{name + " " + string(text), err}
		}()
	}
	ended := make(chan *answer, 1)
	go func() { ended <- answered(s, nil) }()
	// The action sleeps after the line, so the line must arrive before the end.
	select {
	case err := <-firstLine:
		expect.Error(c, err, nil, "ByteStream.Read of %s ended with", stdout)
	case a := <-ended:
		ended <- a
		c.Errorf("the action ended before its first line was read")
	}
	_, r := c.wantSuccess("an action that prints", <-ended)
	want := map[string]bool{stdout + " " + c.stdout(r): true, stderr + " " + c.output(r.GetStderrRaw(), r.GetStderrDigest()): true}
	for range 2 {
		if got := <-whole; got.err != nil || !want[got.text] {
			c.Errorf("ByteStream.Read: got %q, %v, want one of %v", got.text, got.err, want)
		}
	}
	w, err := c.bs.Write(ctx)
	if err == nil {
		if err = w.Send(&bspb.WriteRequest{ResourceName: stdout, Data: []byte("x"), FinishWrite: true}); err == nil || errors.Is(err, io.EOF) {
			_, err = w.CloseAndRecv()
		}
	}
	c.wantCode("ByteStream.Write to "+stdout, err, codes.InvalidArgument)
}

func requestMetadata(c *client) {
	const header = "build.bazel.remote.execution.v2.requestmetadata-bin"
	valid, err := proto.Marshal(&repb.RequestMetadata{
		ToolDetails: &repb.ToolDetails{ToolName: "conformance", ToolVersion: "1"}, ActionId: "a", ToolInvocationId: uuid(),
		CorrelatedInvocationsId: uuid(), ActionMnemonic: "Mnemonic", TargetId: "//x:y", ConfigurationId: "c",
	})
	must.Succeed(c, err)
	unknown := append(slices.Clone(valid), 0xfa, 0x3f, 2, 'x', 'y') // field 1023
	for what, values := range map[string][]string{
		"none": nil, "a valid one": {string(valid)}, "an empty one": {""}, "an invalid one": {string(garbage())},
		"one with an unknown field": {string(unknown)}, "two": {string(valid), string(valid)}, "a long one": {strings.Repeat("\xff", 4000)},
	} {
		ctx := c.Context()
		for _, v := range values {
			ctx = headers.AppendToOutgoingContext(ctx, header, v)
		}
		expect.Error(c, expect.Err(c.absent(ctx, absentDigest(1))), nil, "FindMissingBlobs with request metadata, %s",
			what)
		ctx, cancel := context.WithTimeout(ctx, executeTime)
		a := answered(c.open(ctx, c.prepare(job{steps: []string{"say x"}}), nil))
		cancel()
		c.wantCode("Execute with request metadata, "+what, a.err, codes.OK)
	}
}
