// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/reapi/probe/seen"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

var (
	probeArch = flag.String("arch", runtime.GOARCH, "architecture of the workers of -endpoint, as Go calls it")
	platform  = flag.String("platform", "",
		"platform properties that -endpoint needs, such as OSFamily=linux; with commas")
)

// probe builds the program that the actions of the checks run. It is static, so that it runs on any worker.
var probe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "cloister-probe-")
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "probe")
	defer os.Remove(dir)
	defer os.Remove(name)
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", name, "./probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+*probeArch)
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the probe: %w\n%s", err, out)
	}
	// Read the sources, so that go test does not reuse cached results after they change.
	sources, err := filepath.Glob("probe/*.go")
	for _, source := range sources {
		_, err = os.Stat(source)
	}
	if err != nil {
		return "", err
	}
	b, err := os.ReadFile(name)
	return string(b), err
})

// probeFile returns the probe as a file of an input tree.
func (c *client) probeFile() file {
	c.Helper()
	text := must.Get(probe())(c)
	return file{text: text, x: true}
}

// A job is an action that runs the probe. A random salt makes it unique unless same is set.
type job struct {
	steps   []string
	script  string        // run by /bin/sh, instead of the probe
	command *repb.Command // the rest of the command; its arguments, if any, replace those of the probe
	files   map[string]file
	root    *repb.Digest // the input root, instead of files and the probe
	outputs []string     // output_paths
	timeout time.Duration
	same    bool
	change  func(*repb.Action)
}

// prepare uploads the job and returns the digest of its action.
func (c *client) prepare(j job) *repb.Digest {
	c.Helper()
	cmd := &repb.Command{}
	if j.command != nil {
		cmd = proto.CloneOf(j.command)
	}
	if j.script != "" {
		cmd.Arguments = []string{"/bin/sh", "-c", j.script}
	}
	if len(cmd.Arguments) == 0 {
		up := "./"
		if cmd.WorkingDirectory != "" {
			up = strings.Repeat("../", 1+strings.Count(cmd.WorkingDirectory, "/"))
		}
		cmd.Arguments = append([]string{up + "probe"}, j.steps...)
	}
	if len(j.outputs) > 0 {
		cmd.OutputPaths = j.outputs
	}
	if cmd.Platform == nil {
		cmd.Platform = c.platform()
	}
	a := &repb.Action{CommandDigest: c.putProto(cmd), InputRootDigest: j.root, Platform: cmd.Platform}
	if j.root == nil {
		files := maps.Clone(j.files)
		if files == nil {
			files = map[string]file{}
		}
		if j.script == "" {
			files["probe"] = c.probeFile()
		}
		a.InputRootDigest = c.tree(files)
	}
	if !j.same {
		a.Salt = fresh(8)
	}
	if j.timeout > 0 {
		a.Timeout = durationpb.New(j.timeout)
	}
	if j.change != nil {
		j.change(a)
	}
	return c.putProto(a)
}

// platform returns the properties of -platform and more, sorted, or nil if there are none.
func (c *client) platform(more ...*repb.Platform_Property) *repb.Platform {
	p := &repb.Platform{Properties: more}
	if *platform != "" && !c.ours {
		for term := range strings.SplitSeq(*platform, ",") {
			name, value, _ := strings.Cut(term, "=")
			p.Properties = append(p.Properties, &repb.Platform_Property{Name: name, Value: value})
		}
	}
	if len(p.Properties) == 0 {
		return nil
	}
	slices.SortFunc(p.Properties, byName[*repb.Platform_Property])
	return p
}

// An answer is everything that a server returned for one Execute or WaitExecution.
type answer struct {
	ops []*longrunningpb.Operation
	// response is nil if the call failed.
	response *repb.ExecuteResponse
	// err is the error of the call or the status of the response; clients treat both alike.
	err error
}

func (a *answer) code() codes.Code { return status.Code(a.err) }

// name returns the name of the operation.
func (a *answer) name() string {
	if len(a.ops) == 0 {
		return ""
	}
	return a.ops[0].GetName()
}

// A stream is the stream of Execute or WaitExecution.
type stream interface {
	Recv() (*longrunningpb.Operation, error)
}

// answered reads a stream to its end.
func answered(s stream, err error) *answer {
	const maxOperations = 10_000
	a := &answer{err: err}
	for a.err == nil {
		var op *longrunningpb.Operation
		if op, a.err = s.Recv(); a.err == nil {
			a.ops = append(a.ops, op)
		}
		if len(a.ops) == maxOperations {
			a.err = fmt.Errorf("more than %d messages", maxOperations)
		}
	}
	if !errors.Is(a.err, io.EOF) {
		return a
	}
	if len(a.ops) == 0 {
		a.err = errors.New("the stream ended without a message")
		return a
	}
	r := &repb.ExecuteResponse{}
	if a.err = a.ops[len(a.ops)-1].GetResponse().UnmarshalTo(r); a.err == nil {
		a.response, a.err = r, status.ErrorProto(r.GetStatus())
	}
	return a
}

// executeTime is the timeout of one Execute or WaitExecution.
const executeTime = 10 * time.Minute

// request executes an uploaded action; change may be nil.
func (c *client) request(d *repb.Digest, change func(*repb.ExecuteRequest)) *answer {
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	return answered(c.open(ctx, d, change))
}

// skip makes a request skip the lookup of a result.
func skip(r *repb.ExecuteRequest) { r.SkipCacheLookup = true }

// open starts executing an uploaded action; change may be nil.
func (c *client) open(ctx context.Context, d *repb.Digest, change func(*repb.ExecuteRequest)) (stream, error) {
	req := &repb.ExecuteRequest{InstanceName: c.instance, ActionDigest: d}
	if change != nil {
		change(req)
	}
	return c.exec.Execute(ctx, req)
}

// waitExecution waits for an operation.
func (c *client) waitExecution(name string) *answer {
	ctx, cancel := context.WithTimeout(c.Context(), executeTime)
	defer cancel()
	return answered(c.exec.WaitExecution(ctx, &repb.WaitExecutionRequest{Name: name}))
}

// try executes j.
func (c *client) try(j job) *answer {
	c.Helper()
	return c.request(c.prepare(j), nil)
}

// run executes j, which must have a result.
func (c *client) run(j job) *repb.ExecuteResponse {
	c.Helper()
	return c.wantResult(strings.Join(j.steps, "; "), c.try(j))
}

// wantResult returns the response of an answer, which must be OK and have a result.
func (c *client) wantResult(what string, a *answer) *repb.ExecuteResponse {
	c.Helper()
	if a.err != nil || a.response.GetResult() == nil {
		c.Fatalf("%s: got error %v, message %q, result %v; want a result", what, a.err, a.response.GetMessage(),
			a.response.GetResult())
	}
	return a.response
}

// succeed executes j, which must succeed, and returns its stdout and result.
func (c *client) succeed(j job) (string, *repb.ActionResult) {
	c.Helper()
	return c.wantSuccess(strings.Join(j.steps, "; "), c.try(j))
}

func (c *client) wantSuccess(what string, a *answer) (string, *repb.ActionResult) {
	c.Helper()
	r := c.wantResult(what, a)
	if r.Result.GetExitCode() != 0 {
		c.Fatalf("%s: got exit code %d, message %q, stderr %q; want 0", what, r.Result.GetExitCode(), r.GetMessage(),
			c.output(r.Result.GetStderrRaw(), r.Result.GetStderrDigest()))
	}
	return c.stdout(r.Result), r.Result
}

// stdout returns the stdout of a result.
func (c *client) stdout(r *repb.ActionResult) string {
	c.Helper()
	return c.output(r.GetStdoutRaw(), r.GetStdoutDigest())
}

func (c *client) output(raw []byte, d *repb.Digest) string {
	c.Helper()
	if d == nil || len(raw) > 0 {
		return string(raw)
	}
	return c.get(d)
}

// file returns the contents of an output file, which must exist.
func (c *client) file(r *repb.ActionResult, path string) string {
	c.Helper()
	for _, f := range r.GetOutputFiles() {
		if f.GetPath() == path {
			return c.get(f.GetDigest())
		}
	}
	c.Fatalf("the result has no output file %q: %v", path, r)
	return ""
}

// outputsOf returns the outputs of a result as sorted lines such as "file a/b".
func outputsOf(r *repb.ActionResult) []string {
	var all []string
	for _, f := range r.GetOutputFiles() {
		all = append(all, "file "+f.GetPath())
	}
	for _, d := range r.GetOutputDirectories() {
		all = append(all, "directory "+d.GetPath())
	}
	for _, s := range r.GetOutputSymlinks() {
		all = append(all, "symlink "+s.GetPath())
	}
	slices.Sort(all)
	return all
}

// report decodes the output of the step report.
func (c *client) report(stdout string) *seen.Report {
	c.Helper()
	r := &seen.Report{}
	if err := json.Unmarshal([]byte(stdout), r); err != nil {
		c.Fatalf("the probe's report %.300q: %v", stdout, err)
	}
	return r
}

// look runs a job with only the step report and returns the report.
func (c *client) look(j job) *seen.Report {
	c.Helper()
	j.steps = []string{"report"}
	stdout, _ := c.succeed(j)
	return c.report(stdout)
}

// entries decodes the output of the step tree.
func (c *client) entries(stdout string) map[string]seen.Entry {
	c.Helper()
	all := map[string]seen.Entry{}
	for d := json.NewDecoder(strings.NewReader(stdout)); d.More(); {
		var e seen.Entry
		if err := d.Decode(&e); err != nil {
			c.Fatalf("the probe's tree: %v", err)
		}
		all[e.Path] = e
	}
	return all
}

// recorded returns the entry of an action in the action cache.
func (c *client) recorded(d *repb.Digest) (*repb.ActionResult, error) {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	return c.ac.GetActionResult(ctx, &repb.GetActionResultRequest{InstanceName: c.instance, ActionDigest: d})
}

// notRecorded checks that the action cache has no entry for an action.
func (c *client) notRecorded(what string, d *repb.Digest) {
	c.Helper()
	_, err := c.recorded(d)
	c.wantCode("GetActionResult after "+what, err, codes.NotFound)
}

// refused checks that j fails with the code, either of the call or of the response, and that a server of this tree
// names all parts.
func (c *client) refused(what string, j job, parts []string, ours codes.Code, others ...codes.Code) {
	c.Helper()
	c.wantText("Execute of an action with "+what, c.try(j).err, parts, ours, others...)
}

// missingOf returns the sorted subjects of a status about missing blobs, or an error if the status has any other
// detail: Bazel then uploads nothing (rule 72).
func missingOf(err error) ([]string, error) {
	s := status.Convert(err)
	if s.Code() != codes.FailedPrecondition || len(s.Details()) != 1 {
		return nil, fmt.Errorf("got %v with %d details, want FAILED_PRECONDITION with one", err, len(s.Details()))
	}
	f, ok := s.Details()[0].(*errdetails.PreconditionFailure)
	if !ok {
		return nil, fmt.Errorf("got a detail %T, want a PreconditionFailure", s.Details()[0])
	}
	var all []string
	for _, v := range f.GetViolations() {
		if v.GetType() != "MISSING" {
			return nil, fmt.Errorf("got a violation of type %q, want MISSING alone", v.GetType())
		}
		all = append(all, v.GetSubject())
	}
	slices.Sort(all)
	return all, nil
}

// lists checks that err lists exactly the blobs ds as missing.
func (c *client) lists(what string, err error, ds ...*repb.Digest) {
	c.Helper()
	got, err := missingOf(err)
	if err != nil {
		c.Errorf("%s: %v", what, err)
		return
	}
	var want []string
	for _, d := range ds {
		want = append(want, fmt.Sprintf("blobs/%s/%d", d.GetHash(), d.GetSizeBytes()))
	}
	slices.Sort(want)
	expect.That(c, slices.Equal(got, want),
		"%s: got %d missing blobs %.10q, want %d: %.10q", what, len(got), got, len(want), want)
}

// encoded returns the encoding of m and its digest.
func encoded(t testing.TB, m proto.Message) ([]byte, *repb.Digest) {
	t.Helper()
	b, d, err := cas.MarshalProto(cas.SHA256, m)
	must.Succeed(t, err)
	return b, d.Proto()
}

// garbage returns bytes that are not a valid message: the first tag has an invalid wire type.
func garbage() []byte { return append([]byte{0xff}, fresh(20)...) }

// still checks that the server still answers after something that might have harmed it.
func (c *client) still(after string) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	_, err := c.cas.FindMissingBlobs(ctx,
		&repb.FindMissingBlobsRequest{InstanceName: c.instance, BlobDigests: []*repb.Digest{absentDigest(1)}})
	expect.Error(c, err, nil, "FindMissingBlobs after %s", after)
}
