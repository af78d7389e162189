// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/internal/persistent"
)

// The platform properties that ask for a persistent worker: BuildBuddy's names.
const (
	propertyWorkerKey      = "persistentWorkerKey"
	propertyWorkerProtocol = "persistentWorkerProtocol"
)

func isPersistentProperty(name string) bool {
	return name == propertyWorkerKey || name == propertyWorkerProtocol
}

// A persistentWorker is a tool that runs in a sandbox of its own and serves one request at a time.
type persistentWorker struct {
	*persistent.Process
	ws     sandbox.Workspace
	out    *os.Root     // its exec root
	layout *tree.Layout // of the last request
	room   int64        // bytes of inputs for which the workspace has room
	files  int64
	spec   *sandbox.Spec
	ended  func(*sandbox.Result) // called once, unless the result is unknown
	log    *slog.Logger

	served int           // requests, including the current one
	busy   time.Duration // with requests
}

// Close kills the process and frees its files.
func (w *persistentWorker) Close() {
	if result := w.Process.Close(); result != nil && w.ended != nil {
		w.ended(result)
		w.ended = nil
	}
	w.out.Close()
	closeWorkspace(w.ws, w.log)
}

// exhausted reports whether the requests so far may have used the processor time of one action. The process may use
// twice as much, so the next request still has the time of one action.
func (w *persistentWorker) exhausted() bool {
	cpu := w.spec.Limits.CPU
	return cpu != sandbox.Unlimited && w.busy*time.Duration(runtime.NumCPU()) > cpu/2
}

// A workRequest is an action that is a request to a persistent worker.
type workRequest struct {
	persistent.Request
	startup []string // the command line of the worker
	json    bool
	key     string // of workers that may serve it
	worker  *persistentWorker
	reuse   bool // the worker may serve other requests
	end     func()
}

// workRequest returns the request to a persistent worker, or nil if the action runs in a process of its own: the policy
// does not permit a persistent worker, the action does not ask for one, or it needs what belongs to one run.
func (l *Local) workRequest(t *Task, req *request, box *confined) *workRequest {
	spec, g := box.spec, box.grant
	switch {
	case l.persistent == nil || !g.PersistentWorkers:
		return nil
	case t.uncacheable(), spec.Audit == sandbox.AuditFull, len(g.Fail)+len(g.Kill) > 0, !g.Hermetic, g.Superuser:
		return nil // a worker's events cannot be attributed to one request
	case req.place.own, l.cfg.Features.SameUser, l.cfg.Features.Kernel != "", len(req.Layout.Owned()) > 0:
		return nil // its files cannot be replaced, or not be protected from the tool
	case slices.ContainsFunc(req.outputs, func(o string) bool {
		return o == "." || strings.HasPrefix(req.Command.WorkingDirectory+"/", o+"/")
	}):
		return nil // the working directory must stay
	}
	startup, flags := persistent.Split(spec.Args)
	if len(flags) == 0 {
		return nil
	}
	w := &workRequest{startup: append(slices.Clip(startup), persistent.StartupArgument)}
	hasKey := false
	for _, p := range req.properties() {
		switch p.Name {
		case propertyWorkerProtocol:
			w.json = p.Value == "json"
		case propertyWorkerKey:
			hasKey = p.Value != ""
		}
	}
	h := sha256.New()
	if !w.addInputs(req, hasKey, h) {
		return nil
	}
	l.addKey(h, t, req, box, w.startup)
	w.key = hex.EncodeToString(h.Sum(nil))
	w.Arguments = flags
	return w
}

// addInputs adds the inputs that the request can name, relative to its working directory, and hashes the tools among
// all inputs. It reports whether these identify the process: some input is a tool, and no argument that starts the
// process names another input. Tools are the inputs that the client marks. If it marks none, but gives a key, they are
// those that the arguments name, with all files in directories and runfiles. The key alone does not identify the process, since it need not change when the tool's
// files do.
func (w *workRequest) addInputs(req *request, hasKey bool, h hash.Hash) (identified bool) {
	dir := req.Command.WorkingDirectory
	isTool, names := func(f *tree.InputFile, _ string) bool { return f.Tool }, w.names()
	if !hasTools(req.Input) {
		if !hasKey || !names.addDirectories(req.Input, dir) {
			return false
		}
		isTool = func(_ *tree.InputFile, p string) bool { return names.cover(p) }
	}
	for f := range req.Input.AllFiles() {
		p := f.Path
		if dir != "" {
			var ok bool
			if p, ok = strings.CutPrefix(p, dir+"/"); !ok {
				p = strings.Repeat("../", 1+strings.Count(dir, "/")) + f.Path
			}
		}
		switch {
		case isTool(&f, p):
			if f.Symlink {
				return false // its target may be no tool
			}
			identified = true
			fmt.Fprintf(h, "tool %q %s\n", f.Path, f.Digest)
		case f.Symlink:
			continue
		case names[p]:
			return false
		}
		w.Inputs = append(w.Inputs, persistent.Input{Path: p, Digest: f.Digest})
	}
	return identified
}

// hasTools reports whether the client marks tools among the inputs.
func hasTools(in *tree.Input) bool {
	for f := range in.AllFiles() {
		if f.Tool {
			return true
		}
	}
	return false
}

// namedFiles are the paths that a command line names.
type namedFiles map[string]bool

// names returns the paths that the arguments name with which the process starts.
func (w *workRequest) names() namedFiles {
	names := namedFiles{}
	for _, a := range w.startup {
		for _, name := range strings.FieldsFunc(a, func(c rune) bool { return strings.ContainsRune("=:,", c) }) {
			names[path.Clean(name)] = true
		}
	}
	return names
}

// addDirectories adds the directories of named files, from which tools load others, except the working directory. It
// returns false if names may mean inputs that have other paths: the working directory or those above it, an absolute name
// below the input root, one that follows a symlink, or one with white space, which may be a script.
func (n namedFiles) addDirectories(in *tree.Input, dir string) bool {
	for name := range maps.Clone(n) {
		p := path.Join(dir, name)
		if strings.Trim(name, "./") == "" || strings.ContainsAny(name, " \t\n") || strings.HasPrefix(name+"/", ExecRoot+"/") || followsLink(in, p) {
			return false
		}
		if kind, ok := in.Lookup(p); ok && kind == tree.File && path.Dir(name) != "." {
			n[path.Dir(name)] = true
		}
	}
	return true
}

// followsLink reports whether p or a directory of it is a symlink among the inputs.
func followsLink(in *tree.Input, p string) bool {
	for ; p != "." && p != "/"; p = path.Dir(p) {
		if kind, ok := in.Lookup(p); ok && kind == tree.Symlink {
			return true
		}
	}
	return false
}

// cover reports whether a path, a directory of it, or the program whose runfiles contain it is named.
func (n namedFiles) cover(p string) bool {
	for ; p != "." && p != "/"; p = path.Dir(p) {
		if n[p] || n[strings.TrimSuffix(p, ".runfiles")] {
			return true
		}
	}
	return false
}

// addKey hashes everything, besides the tools, that must be equal for two actions to share a worker.
func (l *Local) addKey(h hash.Hash, t *Task, req *request, box *confined, startup []string) {
	spec := *box.spec
	spec.Args, spec.Timeout = startup, 0
	fmt.Fprintf(h, "instance %q\nprofile %q\nrule %q\ntoolchain %q\nfunction %s\n%s",
		t.Instance, box.grant.Profile, box.grant.Rule, box.toolchain, req.Digest.Function(), spec.Text())
	properties := req.properties()
	slices.SortFunc(properties, Property.Compare)
	for _, p := range properties {
		fmt.Fprintf(h, "property %q %q\n", p.Name, p.Value)
	}
}

// stagePersistent finds or starts a worker for w and gives it the inputs of req.
func (l *Local) stagePersistent(ctx context.Context, t *Task, req *request, box *confined, w *workRequest) (*staged, error) {
	s := &staged{began: time.Now(), request: w, tree: &tree.Staged{Form: tree.FormCopy, CopyReason: "for a persistent worker"}}
	var err error
	if w.Arguments, err = w.expand(ctx, req); err != nil {
		return nil, err
	}
	bytes, files := req.Layout.RestageSize()
	if p, ok := l.persistent.Take(w.key); ok {
		err := errors.New("its workspace is too small")
		if bytes <= p.room && files <= p.files {
			err = req.Layout.Restage(ctx, req.Instance.Store, p.out, p.layout)
		}
		if err == nil {
			p.layout, w.worker = req.Layout, p
		} else {
			p.Close()
			l.cfg.Log.Debug("persistent worker is replaced", "err", err)
		}
	}
	if w.worker == nil {
		if w.worker, err = l.startPersistent(ctx, t, req, box, w, bytes, files); err != nil {
			return nil, err
		}
	}
	p := w.worker
	p.served++
	w.end = func() {
		if w.reuse && !p.exhausted() {
			l.persistent.Put(w.key, p)
		} else {
			p.Close()
		}
	}
	s.ws, s.out, s.ended = p.ws, p.out, time.Now()
	return s, nil
}

// expand returns the arguments in the flag files that the present arguments of w name, which are inputs of req.
func (w *workRequest) expand(ctx context.Context, req *request) ([]string, error) {
	args, err := persistent.Expand(w.Arguments, func(name string) (string, error) {
		i := slices.IndexFunc(w.Inputs, func(in persistent.Input) bool { return in.Path == path.Clean(name) })
		if i < 0 {
			return "", errors.New("not a file of the input root")
		}
		text, err := cas.ReadAll(ctx, req.Instance.Store, w.Inputs[i].Digest, maxFlagFile)
		return string(text), err
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, cas.ErrNotFound) && !errors.Is(err, cas.ErrCorrupt) {
		err = faultf(FaultInvalid, "stage: persistent worker: %w", err)
	}
	return args, err
}

// maxFlagFile bounds a flag file, in bytes.
const maxFlagFile = 32 << 20

// A worker's workspace has room for at least minRoom bytes and minFiles files of inputs.
const (
	minRoom  = 64 << 20
	minFiles = 10_000
)

// startPersistent starts a worker with the inputs of req, which take bytes and files.
func (l *Local) startPersistent(
	ctx context.Context, t *Task, req *request, box *confined, w *workRequest, bytes, files int64,
) (p *persistentWorker, err error) {
	spec := *box.spec
	p = &persistentWorker{
		layout: req.Layout, room: max(minRoom, sum(bytes, bytes)), files: max(minFiles, 2*files), spec: &spec, log: l.cfg.Log,
	}
	if p.ws, err = l.cfg.Backend.Workspace(ctx, sum(p.room, spec.Limits.OutputBytes), sum(p.files, spec.Limits.OutputFiles)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			if p.out != nil {
				p.out.Close()
			}
			closeWorkspace(p.ws, p.log)
		}
	}()
	if err := p.ws.Root().Mkdir(outDir, 0o700); err != nil {
		return nil, err
	}
	if p.out, err = p.ws.Root().OpenRoot(outDir); err != nil {
		return nil, err
	}
	if err := req.Layout.Restage(ctx, req.Instance.Store, p.out, nil); err != nil {
		return nil, err
	}
	spec.Args, spec.Workspace = w.startup, p.ws.Name()
	spec.Outputs = []sandbox.Output{{Target: box.root, Source: outDir}}
	spec.Timeout, spec.Grace = 0, 0 // each request has its timeout; nothing in the process is worth a grace period
	if cpu := spec.Limits.CPU; cpu != sandbox.Unlimited {
		spec.Limits.CPU = time.Duration(sum(int64(cpu), int64(cpu)))
	}
	if err := spec.Validate(); err != nil {
		return nil, fmt.Errorf("confine: %w", err)
	}
	first := *t // violations are recorded with the action that started the process
	p.ended = func(r *sandbox.Result) { l.audit(&first, NewViolations(r, box.root)) }
	p.Process, err = persistent.Start(ctx, w.json, func(ctx context.Context, std sandbox.Stdio) (*sandbox.Result, error) {
		return l.cfg.Backend.Run(ctx, &spec, std)
	})
	return p, err
}

// runPersistent sends w to its worker and returns a Result as if it had been a run. The failure, if not "", is how the
// worker failed.
func (l *Local) runPersistent(ctx context.Context, box *confined, w *workRequest, stderr io.Writer) (
	r *sandbox.Result, failure string, err error,
) {
	r = &sandbox.Result{Start: time.Now(), Released: true, Executed: l.commandProgram(box.spec)}
	response, err := w.worker.Do(ctx, &w.Request, box.spec.Timeout)
	r.End = time.Now()
	w.worker.busy += r.End.Sub(r.Start)
	f, failed := errors.AsType[*persistent.Failure](err)
	switch {
	case failed:
		r.ExitCode, r.Stopped = 1, f.TimedOut
		switch end := f.Result; {
		case f.TimedOut:
			r.Signal, r.ExitCode = syscall.SIGKILL, 128+int(syscall.SIGKILL)
		case end != nil && !end.Stopped && end.ExitCode != 0:
			r.ExitCode, r.Signal, r.Exceeded = end.ExitCode, end.Signal, end.Exceeded
		}
		_, _ = io.WriteString(stderr, f.Stderr)
		return r, f.Reason, nil
	case err != nil:
		return nil, "", err
	}
	r.ExitCode = int(response.ExitCode)
	_, _ = io.WriteString(stderr, response.Output)
	err = tree.Lock(w.worker.out)
	if errors.Is(err, tree.ErrOutput) { // what is not locked must not change while it is read
		w.worker.Process.Close()
		r.ExitCode = max(1, r.ExitCode)
		return r, err.Error(), nil
	}
	return r, "", err
}
