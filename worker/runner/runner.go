// SPDX-License-Identifier: Apache-2.0

// Package runner runs the commands of Buildbarn's workers in the sandbox: the service buildbarn.runner.Runner, in the place
// of bb_runner. It is no worker: its client has fetched the inputs, has laid them out in a directory of this host, and
// collects the outputs there.
//
// No command gets to that directory. It runs in ExecRoot, where
//   - each file of the input root is the client's own, on a read-only mount: it can be neither written nor removed, nor
//     replaced, whoever owns it and however many names it has in the client's cache;
//   - directories and symbolic links are copies, in a workspace, and whatever the command makes lies there, too;
//   - what it made is copied into the client's directory once nothing of the run is alive any more, and what it removed is
//     removed there. Of a run that was cancelled before its end nothing is.
//
// See docs/runner.md for what this cannot promise.
package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// A Config says what a Runner is made of.
type Config struct {
	// BuildDir is the directory that paths of requests are relative to: absolute, and without symbolic links.
	BuildDir string
	Backend  sandbox.Backend
	Features sandbox.Features // what Backend.Probe said
	// Toolchain is what every command may read besides its input root; see worker.HostToolchain.
	Toolchain []sandbox.Input
	// Policy says what commands may be given. A request of this protocol says nothing of the action, so that all are
	// given the same. Nil is policy.Default.
	Policy *policy.Policy
	// Jobs is how many commands run at once; what comes beyond waits. It is at least 1.
	Jobs int
	Log  *slog.Logger
}

// A Runner is the service. Its methods are safe for concurrent use.
type Runner struct {
	runnerpb.UnimplementedRunnerServer

	config Config
	grant  *policy.Grant
	audit  sandbox.Audit
	jobs   chan struct{} // holds one for each command that runs
}

// New returns a Runner. It fails if the backend cannot enforce what the policy says.
func New(c Config) (*Runner, error) {
	if c.Policy == nil {
		c.Policy = policy.Default()
	}
	grant, err := c.Policy.Compile(policy.Request{}, c.Features.Limits)
	if err != nil {
		return nil, err
	}
	r := &Runner{config: c, grant: grant, audit: grant.Audit, jobs: make(chan struct{}, c.Jobs)}
	if r.audit == sandbox.AuditViolations && !slices.Contains(c.Features.Audits, sandbox.AuditViolations) {
		r.audit = sandbox.AuditOff // the operator chose a sandbox without the syscall monitor, as the banner says
	}
	if err := c.Features.Covers(r.spec()); err != nil {
		return nil, fmt.Errorf("profile %q by rule %q: %w", grant.Profile, grant.Rule, err)
	}
	return r, nil
}

// Register has the server offer the service.
func (r *Runner) Register(s grpc.ServiceRegistrar) { runnerpb.RegisterRunnerServer(s, r) }

// spec is what every command may see and use, before it is known which it is.
func (r *Runner) spec() *sandbox.Spec {
	return &sandbox.Spec{
		Inputs:  slices.Clip(r.config.Toolchain),
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: r.grant.TempBytes}},
		Network: r.grant.Network,
		Limits:  r.grant.Limits,
		Audit:   r.audit,
		Timeout: r.grant.MaxTimeout,
	}
}

// CheckReadiness fails with UNAVAILABLE if no command could be sandboxed now, or what the request names is not there.
func (r *Runner) CheckReadiness(ctx context.Context, req *runnerpb.CheckReadinessRequest) (*emptypb.Empty, error) {
	p, err := local("path", cmp.Or(req.Path, "."))
	if err != nil {
		return nil, err
	}
	build, err := os.OpenRoot(r.config.BuildDir)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "build directory: %v", err)
	}
	defer build.Close()
	if _, err := build.Stat(p); err != nil {
		return nil, status.Errorf(codes.Unavailable, "path: %v, below %s", err, r.config.BuildDir)
	}
	// A program that is not there ends well as soon as everything else is, and Probe would take the end of ctx for the host's
	// fault.
	spec := r.spec()
	spec.Args, spec.Dir, spec.Audit = []string{"/tmp/none"}, "/tmp", sandbox.AuditOff
	if _, err := r.config.Backend.Run(ctx, spec, sandbox.Stdio{}); err != nil {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		return nil, status.Errorf(codes.Unavailable, "commands cannot be sandboxed here: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// Run runs a command to its end, or until its caller gives up. A command that was executed yields a response; one that
// ended well and yet cannot be taken for what its action asked for (a limit was met, an output cannot be carried over) is
// FAILED_PRECONDITION, since the client would record its result.
func (r *Runner) Run(ctx context.Context, req *runnerpb.RunRequest) (*runnerpb.RunResponse, error) {
	c, err := r.read(req)
	if err != nil {
		return nil, err
	}
	select {
	case r.jobs <- struct{}{}:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	defer func() { <-r.jobs }()
	// Each time anew: a worker that starts later may mount its build directory.
	if c.build, err = os.OpenRoot(r.config.BuildDir); err != nil {
		return nil, status.Errorf(codes.Unavailable, "build directory: %v", err)
	}
	defer c.build.Close()
	resp, err := r.run(ctx, c)
	if ctx.Err() != nil {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if err == nil {
		return resp, nil
	}
	if _, ok := status.FromError(err); ok {
		return nil, err
	}
	r.config.Log.Error("command", "input_root", c.inputRoot, "err", err)
	return nil, status.Error(codes.Internal, err.Error())
}

// run runs a command that makes sense. An error that is no status is ours.
func (r *Runner) run(ctx context.Context, c *command) (*runnerpb.RunResponse, error) {
	stdout, err := r.newLog(c, "stdout_path", c.stdout)
	if err != nil {
		return nil, err
	}
	defer stdout.file.Close()
	stderr, err := r.newLog(c, "stderr_path", c.stderr)
	if err != nil {
		return nil, err
	}
	defer stderr.file.Close()
	in, err := c.openInputRoot()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	laid, err := scan(ctx, in)
	if err != nil {
		return nil, err
	}
	spec := r.spec()
	ws, err := r.config.Backend.Workspace(ctx, beside(laid.bytes(), spec.Limits.OutputBytes), beside(laid.files(), spec.Limits.OutputFiles))
	if err != nil {
		return nil, err
	}
	defer ws.Close() // what does not close is memory lost, which the next workspace reports as full
	out, err := laid.make(ws.Root())
	if err != nil {
		return nil, fmt.Errorf("lay out the input root: %w", err)
	}
	defer out.Close()
	spec.Args, spec.Env = c.args, c.env
	spec.Dir = path.Join(worker.ExecRoot, c.workingDirectory)
	spec.Workspace = ws.Name()
	spec.Outputs = []sandbox.Output{{Target: worker.ExecRoot, Source: outDir}}
	spec.Inputs = laid.inputs(spec.Inputs, filepath.Join(r.config.BuildDir, filepath.FromSlash(c.inputRoot)))
	res, err := r.config.Backend.Run(ctx, spec, sandbox.Stdio{Stdout: stdout, Stderr: stderr})
	if res != nil {
		tried := worker.NewViolations(res)
		defer func() { r.tell(c, tried) }()
		if err == nil {
			return r.finish(ctx, res, tried, laid, out, in, stderr)
		}
	}
	return nil, err
}

// finish carries over what a run made, also one that failed, and says how it ended. Of one that was cancelled nothing is
// carried over, since ctx has ended.
func (r *Runner) finish(ctx context.Context, res *sandbox.Result, tried *worker.Violations, laid *layout, out, in *os.Root, stderr *log) (*runnerpb.RunResponse, error) {
	left, refused := laid.carry(ctx, out, in, r.grant.Limits.OutputBytes)
	tried.Events = append(tried.Events, left...)
	if _, ok := status.FromError(refused); !ok {
		return nil, refused
	}
	switch i := slices.IndexFunc(tried.Events, func(e sandbox.Event) bool { return e.Kind == sandbox.EventLimit }); {
	case res.Stopped:
		return nil, status.Errorf(codes.DeadlineExceeded, "killed after %v, the longest time that profile %q of the policy permits", r.grant.MaxTimeout, r.grant.Profile)
	case res.ExitCode == 0 && i >= 0:
		return nil, status.Errorf(codes.FailedPrecondition, "ended well but met a limit, so that its result is not to be recorded: %s; profile %q of the policy says how much is permitted", tried.Events[i], r.grant.Profile)
	case res.ExitCode == 0 && refused != nil:
		return nil, refused
	case res.ExitCode != 0:
		lines := tried.Lines()
		if refused != nil {
			lines = append([]string{status.Convert(refused).Message()}, lines...)
		}
		if err := stderr.add(lines); err != nil {
			return nil, err
		}
	}
	usage, err := anypb.New(worker.POSIXUsage(res))
	if err != nil {
		return nil, err
	}
	resp := &runnerpb.RunResponse{ExitCode: int32(res.ExitCode), ResourceUsage: []*anypb.Any{usage}}
	if res.Signal != 0 {
		resp.ExitCode = -1 // as bb_runner has it; usage names the signal
	}
	return resp, nil
}

// tell says to the operator, and to whoever reads the logs that the client keeps, what a command tried.
func (r *Runner) tell(c *command, tried *worker.Violations) {
	if len(tried.Events)+tried.Unrecorded == 0 {
		return
	}
	r.config.Log.Warn("attempts of a command", "input_root", c.inputRoot, "exit", tried.ExitCode,
		"events", len(tried.Events)+tried.Unrecorded, "first", tried.First().String())
	if c.serverLogs == "" {
		return
	}
	text := fmt.Sprintf("profile %q, chosen by rule %q\nexit code %d\n%s\n", r.grant.Profile, r.grant.Rule, tried.ExitCode, strings.Join(tried.Lines(), "\n"))
	f, err := c.build.OpenFile(path.Join(c.serverLogs, logName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		// It explains a result, and is none of it.
		r.config.Log.Warn("server_logs_directory", "err", err)
	}
}

// logName is the file in a request's directory for logs that says what the command tried.
const logName = "cloister.txt"

// openInputRoot opens the input root, and checks the working directory.
func (c *command) openInputRoot() (*os.Root, error) {
	if err := c.plain("input_root_directory", c.inputRoot); err != nil {
		return nil, err
	}
	in, err := c.build.OpenRoot(c.inputRoot)
	if err != nil {
		return nil, unusable("input_root_directory", err)
	}
	if st, err := in.Stat(c.workingDirectory); err != nil || !st.IsDir() {
		in.Close()
		if err == nil {
			err = &fs.PathError{Op: "chdir", Path: c.workingDirectory, Err: syscall.ENOTDIR}
		}
		return nil, unusable("working_directory", err)
	}
	return in, nil
}

// plain refuses a path that leads through a symbolic link or a file: a mount's source must be where its name says.
func (c *command) plain(field, p string) error {
	for i, b := range []byte(p + "/") {
		if b != '/' {
			continue
		}
		st, err := c.build.Lstat(p[:i])
		if err != nil {
			return unusable(field, err)
		}
		if !st.IsDir() {
			return status.Errorf(codes.InvalidArgument, "%s: %q is no directory; symbolic links are not followed", field, p[:i])
		}
	}
	return nil
}

// unusable returns the status for a path of a request that could not be used: the client's fault, unless this host is
// at its end.
func unusable(field string, err error) error {
	for _, ours := range []error{syscall.ENOSPC, syscall.EMFILE, syscall.ENFILE, syscall.EIO, syscall.ENOMEM, syscall.EROFS} {
		if errors.Is(err, ours) {
			return fmt.Errorf("%s: %w", field, err)
		}
	}
	return status.Errorf(codes.InvalidArgument, "%s: %v", field, err)
}

// beside returns the room for what is laid out and for what a command may make beside it.
func beside(inputs, outputs int64) int64 {
	if outputs == sandbox.Unlimited {
		return sandbox.Unlimited
	}
	return inputs + outputs
}
