// SPDX-License-Identifier: Apache-2.0

// Package runner runs the commands of Buildbarn's workers in the sandbox. It implements the service
// buildbarn.runner.Runner and replaces bb_runner. Its client fetches the inputs, places them in a directory of this
// host, and collects the outputs there.
//
// A command has no access to that directory. It runs in ExecRoot, where
//   - each file of the input root is the client's own file on a read-only mount. It cannot be written, removed or
//     replaced, regardless of its owner and of its hard links in the client's cache;
//   - directories and symbolic links are copies in a workspace, which also holds everything the command creates;
//   - after the last process of the run has ended, everything it created is copied to the client's directory, and
//     everything it removed is removed there. Nothing is copied if the run was cancelled.
//
// See docs/runner.md for what this cannot guarantee.
package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/violation"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Config configures a Runner. BuildDir, Backend, Features, Toolchain and Jobs are required.
type Config struct {
	// BuildDir is the directory to which the paths of requests are relative. It is absolute and has no symbolic links.
	BuildDir string
	Backend  sandbox.Backend
	Features sandbox.Features // result of Backend.Probe
	// Toolchain lists what every command may read in addition to its input root; see sandbox.HostToolchain. An empty list,
	// which is not nil, means nothing.
	Toolchain []sandbox.Input
	// Policy decides what commands may use; nil is policy.Default(). Requests of this protocol do not describe the
	// action, so the same rule applies to all commands.
	Policy *policy.Policy
	// Jobs is the number of concurrent commands, at least 1. Further commands wait.
	Jobs int
	Log  *slog.Logger
}

// A Runner implements the service. Its methods are safe for concurrent use.
type Runner struct {
	runnerpb.UnimplementedRunnerServer

	config Config
	grant  *policy.Grant
	audit  sandbox.Audit
	jobs   chan struct{} // holds a value for each running command
}

// New returns a Runner. It fails if a required field is missing, or the backend cannot enforce the policy.
func New(c Config) (*Runner, error) {
	switch {
	case c.BuildDir == "":
		return nil, errors.New("runner: Config.BuildDir is missing")
	case c.Backend == nil:
		return nil, errors.New("runner: Config.Backend is missing")
	case c.Toolchain == nil:
		return nil, errors.New("runner: Config.Toolchain is missing: set it to the result of sandbox.HostToolchain, " +
			"or to []sandbox.Input{} for none")
	case c.Jobs < 1:
		return nil, fmt.Errorf("runner: Config.Jobs is %d: it must be at least 1", c.Jobs)
	}
	if c.Policy == nil {
		c.Policy = policy.Default()
	}
	grant, err := c.Policy.Compile(policy.Request{}, c.Features.Limits)
	if err != nil {
		return nil, err
	}
	r := &Runner{config: c, grant: grant, audit: grant.Audit, jobs: make(chan struct{}, c.Jobs)}
	counts := violation.NeedMonitor(slices.Concat(grant.Fail, grant.Kill))
	if r.audit == sandbox.AuditViolations && !counts && !slices.Contains(c.Features.Audits, sandbox.AuditViolations) {
		r.audit = sandbox.AuditOff // the operator chose a sandbox that cannot audit, as the banner says
	}
	if err := c.Features.Covers(r.spec()); err != nil {
		return nil, fmt.Errorf("profile %q by rule %q: %w", grant.Profile, grant.Rule, err)
	}
	return r, nil
}

// Register registers the service on s.
func (r *Runner) Register(s grpc.ServiceRegistrar) { runnerpb.RegisterRunnerServer(s, r) }

// spec returns the part of the spec that all commands share.
func (r *Runner) spec() *sandbox.Spec {
	return &sandbox.Spec{
		Inputs:  slices.Clip(r.config.Toolchain),
		Temp:    []sandbox.Temp{{Target: "/tmp", Bytes: r.grant.TempBytes}},
		Network: r.grant.Network,
		Limits:  r.grant.Limits,
		Audit:   r.audit,
		Kill:    r.grant.Kill,
		Timeout: r.grant.MaxTimeout,
	}
}

// CheckReadiness fails with UNAVAILABLE if commands cannot be sandboxed now, or if the path of the request does not
// exist.
func (r *Runner) CheckReadiness(ctx context.Context, req *runnerpb.CheckReadinessRequest) (*emptypb.Empty, error) {
	p, err := cleanPath("path", cmp.Or(req.Path, "."))
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
	// Run a program that does not exist, which succeeds once everything else works. Probe would blame the host if ctx
	// ended.
	spec := r.spec()
	spec.Args, spec.Dir, spec.Audit, spec.Kill = []string{"/tmp/none"}, "/tmp", sandbox.AuditOff, nil
	if _, err := r.config.Backend.Run(ctx, spec, sandbox.Stdio{}); err != nil {
		if ctx.Err() != nil {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		return nil, status.Errorf(codes.Unavailable, "commands cannot be sandboxed: %v", err)
	}
	return &emptypb.Empty{}, nil
}

// Run runs a command until it ends or the caller cancels. A command that was executed yields a response. But the client
// caches every success, so a command that exits with 0 and yet hit a limit, or whose outputs cannot be copied back, is
// FAILED_PRECONDITION.
func (r *Runner) Run(ctx context.Context, req *runnerpb.RunRequest) (*runnerpb.RunResponse, error) {
	c, err := parse(req)
	if err != nil {
		return nil, err
	}
	select {
	case r.jobs <- struct{}{}:
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	defer func() { <-r.jobs }()
	// Open it for each run, since the worker may start later and mount its build directory then.
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
	r.config.Log.Error("cannot run a command", "input_root", c.inputRoot, "err", err)
	return nil, status.Error(codes.Internal, err.Error())
}

// run runs a command. An error that is not a gRPC status is our fault.
func (r *Runner) run(ctx context.Context, c *command) (_ *runnerpb.RunResponse, err error) {
	stdout, err := r.newLog(c, "stdout_path", c.stdout)
	if err != nil {
		return nil, err
	}
	defer stdout.close(&err)
	stderr, err := r.newLog(c, "stderr_path", c.stderr)
	if err != nil {
		return nil, err
	}
	defer stderr.close(&err)
	in, err := c.openInputRoot()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	l, err := scan(ctx, in)
	if err != nil {
		return nil, err
	}
	spec := r.spec()
	bytes, files := l.workspace(spec.Limits)
	ws, err := r.config.Backend.Workspace(ctx, bytes, files)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := ws.Close(); err != nil { // its memory or its directory on disk remains
			r.config.Log.Warn("cannot remove a workspace", "workspace", ws.Name(), "err", err)
		}
	}()
	out, err := l.create(ws.Root())
	if err != nil {
		return nil, fmt.Errorf("stage the input root: %w", err)
	}
	defer out.Close()
	spec.Args, spec.Env = c.args, c.env
	spec.Dir = path.Join(worker.ExecRoot, c.workingDirectory)
	spec.Workspace = ws.Name()
	spec.Outputs = []sandbox.Output{{Target: worker.ExecRoot, Source: outDir}}
	spec.Inputs = l.inputs(spec.Inputs, filepath.Join(r.config.BuildDir, filepath.FromSlash(c.inputRoot)))
	res, err := r.config.Backend.Run(ctx, spec, sandbox.Stdio{Stdout: stdout, Stderr: stderr})
	if res != nil {
		did := violation.Apply(res, r.grant.Fail, r.grant.Kill)
		v := worker.NewViolations(res, worker.ExecRoot)
		v.OnViolation = did
		defer func() { r.report(c, v) }()
		if err == nil {
			left, refused := l.copyBack(ctx, out, in, r.grant.Limits.OutputBytes)
			v.Events = append(v.Events, left...)
			if _, ok := status.FromError(refused); !ok {
				return nil, refused
			}
			return r.respond(res, v, refused, stderr)
		}
	}
	return nil, err
}

// respond returns the response for a run with these violations. refused is the status with which its outputs were
// refused, or nil.
func (r *Runner) respond(
	res *sandbox.Result, v *worker.Violations, refused error, stderr *log,
) (*runnerpb.RunResponse, error) {
	limit := slices.IndexFunc(v.Events, func(e sandbox.Event) bool { return e.Kind == sandbox.EventLimit })
	switch {
	case res.Stopped:
		return nil, status.Errorf(codes.DeadlineExceeded,
			"killed: exceeded %v, the maximum of profile %q; raise its max_timeout in the policy", r.grant.MaxTimeout, r.grant.Profile)
	case res.ExitCode == 0 && limit >= 0:
		return nil, status.Errorf(codes.FailedPrecondition,
			"succeeded but hit a limit, so its result must not be cached: %s; see profile %q of the policy",
			v.Events[limit], r.grant.Profile)
	case res.ExitCode == 0 && refused != nil:
		return nil, refused
	case res.ExitCode != 0:
		lines := v.Lines()
		if v.OnViolation != "" {
			lines = append([]string{fmt.Sprintf("its violations count, by on_violation of profile %q", r.grant.Profile)}, lines...)
		}
		if refused != nil {
			lines = append([]string{status.Convert(refused).Message()}, lines...)
		}
		if err := stderr.addHints(lines); err != nil {
			return nil, err
		}
	}
	usage, err := anypb.New(worker.POSIXUsage(res))
	if err != nil {
		return nil, err
	}
	resp := &runnerpb.RunResponse{ExitCode: int32(res.ExitCode), ResourceUsage: []*anypb.Any{usage}}
	if res.Signal != 0 {
		resp.ExitCode = -1 // like bb_runner; usage names the signal
	}
	return resp, nil
}

// logName is the file in the server logs directory that lists the violations of the command.
const logName = "cloister.txt"

// report reports violations to the operator, and in the server logs that the client keeps.
func (r *Runner) report(c *command, v *worker.Violations) {
	if len(v.Events)+v.Unrecorded == 0 {
		return
	}
	level := slog.LevelWarn
	if v.Harmless() {
		level = slog.LevelDebug
	}
	r.config.Log.Log(context.Background(), level, "the sandbox denied operations of a command", "input_root", c.inputRoot, "exit", v.ExitCode,
		"events", len(v.Events)+v.Unrecorded, "first", v.First().String())
	if c.serverLogs == "" {
		return
	}
	lines := v.Lines()
	if v.OnViolation != "" {
		lines = append([]string{"on violation " + v.OnViolation}, lines...)
	}
	text := fmt.Sprintf("profile %q, chosen by rule %q\nexit code %d\n%s\n", r.grant.Profile, r.grant.Rule, v.ExitCode, strings.Join(lines, "\n"))
	f, err := c.build.OpenFile(path.Join(c.serverLogs, logName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil { // it explains a result and is not part of it
		r.config.Log.Warn("cannot write the server log of a command", "err", err)
	}
}
