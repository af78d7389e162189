// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// workDir is the directory of every step in the sandbox.
const workDir = worker.ExecRoot

// maxLog bounds stdout and stderr of a step, each, in bytes.
const maxLog = 32 << 20

// grace is the time between SIGTERM and SIGKILL.
const grace = 5 * time.Second

// A logBuffer keeps the beginning of an output.
type logBuffer struct{ bytes.Buffer }

func (l *logBuffer) Write(p []byte) (int, error) {
	keep := p[:min(len(p), max(0, maxLog-l.Len()))]
	l.Buffer.Write(keep)
	if len(keep) > 0 && len(keep) < len(p) {
		l.WriteString(worker.TruncationNotice)
	}
	return len(p), nil
}

// runStep runs a step, completes its report and writes its evidence. An error means that it did not run to its end.
func (g *gate) runStep(ctx context.Context, s *step, r *stepReport) error {
	t := timing{ID: s.id}
	began := time.Now()
	src, err := g.source(ctx, s)
	if err != nil {
		return err
	}
	run := g.confine
	if g.observer != nil {
		run = g.observe
	}
	var stdout, stderr logBuffer
	result, record, err := run(ctx, s, r, src, sandbox.Stdio{Stdout: &stdout, Stderr: &stderr})
	if result != nil {
		t.SetUp, t.Run, t.CleanUp = result.Start.Sub(began), result.End.Sub(result.Start), time.Since(result.End)
		g.complete(ctx, s, r, result)
		err = errors.Join(err, g.keep(s, r, result, stdout.Bytes(), stderr.Bytes()))
		if g.observer != nil {
			err = errors.Join(err, g.evidence.write("logs/"+s.id+"/"+g.observer.record, record))
		}
		g.showFailure(r, stdout.Bytes(), stderr.Bytes())
		g.mu.Lock()
		g.metrics.Steps = append(g.metrics.Steps, t)
		g.mu.Unlock()
	}
	return errors.Join(err, context.Cause(ctx))
}

// confine runs a step in the sandbox. It returns no record, which only an observer writes.
func (g *gate) confine(ctx context.Context, s *step, r *stepReport, src *source, std sandbox.Stdio) (*sandbox.Result, []byte, error) {
	spec, err := g.spec(s, src)
	if err != nil {
		return nil, nil, err
	}
	size, files, err := src.measure()
	if err != nil {
		return nil, nil, fmt.Errorf("inputs: %w", err)
	}
	room := func(limit, inputs int64) int64 {
		if limit == sandbox.Unlimited {
			return limit
		}
		return limit + inputs
	}
	ws, err := g.backend.Workspace(ctx, room(spec.Limits.OutputBytes, size), room(spec.Limits.OutputFiles, files))
	if err != nil {
		return nil, nil, err
	}
	spec.Workspace = ws.Name()
	var sum string
	if spec.Owned, sum, err = src.copyTo(ws.Root(), spec.Outputs[0].Source); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("inputs: %w", err), ws.Close())
	}
	r.Inputs = src.describe(sum)
	result, err := g.backend.Run(ctx, spec, std)
	return result, nil, errors.Join(err, ws.Close())
}

// environment returns the variables of a step: first those that it may override.
func (s *step) environment(src *source, more ...string) []string {
	env := append([]string{noListen + "=1", "SOURCE_DATE_EPOCH=" + strconv.FormatInt(src.time.Unix(), 10)}, more...)
	return append(env, s.env...)
}

// locate replaces the revision of a step by its commit, or its directory by the path without links.
func (s *step) locate(ctx context.Context) (err error) {
	switch given := s.directory; {
	case s.revision != "":
		given = s.revision
		if s.revision, err = resolve(ctx, ".", given); err != nil {
			return fmt.Errorf("revision %s: %w", given, err)
		}
	case given != "":
		if s.directory, err = filepath.EvalSymlinks(given); err != nil {
			return fmt.Errorf("inputs: %w", err)
		}
		if fi, err := os.Stat(s.directory); err != nil || !fi.IsDir() {
			return fmt.Errorf("inputs: %s is not a directory", given)
		}
		if !filepath.IsLocal(s.directory) {
			return fmt.Errorf("inputs: directory %s leads out of the working directory", given)
		}
	}
	return nil
}

// source returns the files of a located step. Steps on one commit share them.
func (g *gate) source(ctx context.Context, s *step) (*source, error) {
	if s.directory != "" {
		return &source{dir: s.directory, time: time.Unix(0, 0)}, nil
	}
	commit := cmp.Or(s.revision, g.report.Revision)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sources[commit] == nil {
		dir := filepath.Join(g.dir, commit)
		src, err := checkOut(ctx, ".", commit, dir)
		if err != nil { // the next step fails in the same way
			return nil, errors.Join(fmt.Errorf("check out %s: %w", commit, err), os.RemoveAll(dir))
		}
		g.sources[commit] = src
	}
	return g.sources[commit], nil
}

// spec returns what a step may see and use. Its environment contains no variable of this process.
func (g *gate) spec(s *step, src *source) (*sandbox.Spec, error) {
	tools, err := sandbox.HostToolchain()
	if err != nil {
		return nil, err
	}
	allow := s.endpoints(g.today)
	if len(allow) > 0 {
		certificates, err := sandbox.HostCertificates()
		if err != nil {
			return nil, err
		}
		tools = append(tools, certificates...)
	}
	spec, err := sandbox.ForTest(sandbox.Profile{
		Args: s.command, Dir: workDir, Env: s.environment(src), Tools: tools, Outputs: []string{workDir}, Network: allow,
	})
	if err != nil {
		return nil, err
	}
	granted, err := grant(s.limits, g.features.Limits)
	if err != nil {
		return nil, err
	}
	spec.Limits, spec.Temp[0].Bytes = granted.Limits, granted.TempBytes
	spec.Timeout, spec.Grace = s.timeout, grace
	spec.Network.Listen = s.listen || !g.features.ListenControl
	if !g.report.Sandbox.Observed {
		spec.Audit = sandbox.AuditOff
	}
	return spec, g.features.Covers(spec)
}

// complete completes the report of a step that ran.
func (g *gate) complete(ctx context.Context, s *step, r *stepReport, result *sandbox.Result) {
	f := s.find(result, g.Policy, g.today)
	for i := range f.violations {
		if v := &f.violations[i]; g.observer != nil && v.Kind != "exception" {
			v.Text = seen(v)
		}
	}
	r.Violations, r.Exceptions, r.ExitCode = f.violations, f.uses, result.ExitCode
	if r.ExitCode != 0 {
		r.Denied = f.denied
	}
	switch {
	case ctx.Err() != nil:
		r.Verdict = interrupted
	case len(r.Violations) > 0:
		r.Verdict = violated
	case result.Stopped:
		r.Verdict = timedOut
	case r.ExitCode != 0:
		r.Verdict = failed
	default:
		r.Verdict = g.best()
	}
	if result.Stopped && ctx.Err() == nil {
		r.Message = fmt.Sprintf("killed: exceeded its timeout of %v", s.timeout)
	} else if e := result.Exceeded; e != nil {
		r.Message = e.String()
	}
}

// A listener is an attempt to listen.
type listener struct {
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Process  string `json:"process"`
	Count    int    `json:"count"`
}

// programs lists the tools that a step executed.
type programs struct {
	// Complete means that every executed tool is listed, and the interpreter of each executed file of the step.
	Complete bool     `json:"complete"`
	Executed []string `json:"executed"`
}

// keep writes the evidence of a step.
func (g *gate) keep(s *step, r *stepReport, result *sandbox.Result, stdout, stderr []byte) error {
	listeners := []listener{}
	network := []violation{}
	for _, v := range r.Violations {
		switch v.Kind {
		case "listen":
			_, what, _ := strings.Cut(strings.TrimSuffix(v.Subject, ")"), "(")
			protocol, address, _ := strings.Cut(what, " ")
			listeners = append(listeners, listener{protocol, address, v.Process, v.Count})
		case "exception":
		default:
			network = append(network, v)
		}
	}
	executed := append([]string{}, result.Executed...)
	in := "logs/" + s.id + "/"
	e := g.evidence
	return errors.Join(
		e.write(in+"stdout.txt", stdout),
		e.write(in+"stderr.txt", stderr),
		e.writeJSON(in+"network.json", struct {
			Violations []violation `json:"violations"`
			Exceptions []use       `json:"exceptions"`
			Unrecorded int         `json:"unrecorded"`
		}{network, r.Exceptions, result.Unrecorded}),
		e.writeJSON(in+"listen.json", listeners),
		e.writeJSON(in+"process_tree.json", programs{result.ExecutedAll, executed}),
	)
}

// showFailure prints the last lines of the output of a step that failed.
func (g *gate) showFailure(r *stepReport, stdout, stderr []byte) {
	if r.ExitCode == 0 {
		return
	}
	const shown = 20
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, text := range [][]byte{stdout, stderr} {
		lines := slices.Collect(strings.Lines(g.clean.Replace(string(text))))
		for _, line := range lines[max(0, len(lines)-shown):] {
			fmt.Fprintf(g.Notes, "  %s\n", strings.TrimSuffix(line, "\n"))
		}
	}
}
