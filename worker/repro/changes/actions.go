// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro/internal/listdiff"
)

// Actions returns how action b differs from action a in its command, environment, platform, timeout and inputs, and so
// why b misses the cache. Different digests always have at least one change. It fails if an action or its command
// cannot be read. A missing input root is one change, because clients that only use a cache upload no inputs.
func Actions(ctx context.Context, r *Reader, a, b cas.Digest) ([]Change, error) {
	x, err := ReadAction(ctx, r.Store, a)
	if err != nil {
		return nil, err
	}
	y, err := ReadAction(ctx, r.Store, b)
	if err != nil {
		return nil, err
	}
	rootA, errA := x.Root()
	rootB, errB := y.Root()
	if err := errors.Join(errA, errB); err != nil {
		return nil, err
	}
	all := slices.Concat(commands(x.Command, y.Command), properties("platform", x.Platform(), y.Platform()))
	for _, c := range []Change{
		{What: "timeout", A: x.timeout(), B: y.timeout()},
		{What: "do_not_cache", A: strconv.FormatBool(x.DoNotCache), B: strconv.FormatBool(y.DoNotCache)},
		{What: "salt", A: salt(x.Salt), B: salt(y.Salt)},
	} {
		if c.A != c.B {
			all = append(all, c)
		}
	}
	if a.Function() != b.Function() {
		all = append(all, Change{What: "digest function", A: a.Function().String(), B: b.Function().String()})
	}
	if rootA == rootB {
		return orEncoding(all, "action", a, b), nil
	}
	inputs, err := Directories(ctx, "input", r.Directory(rootA), r.Directory(rootB))
	if errors.Is(err, cas.ErrNotFound) {
		inputs = append(inputs, Change{What: "input root", A: r.inputRoot(ctx, rootA), B: r.inputRoot(ctx, rootB)})
		err = nil
	}
	return append(all, inputs...), err
}

// Commands is Actions for two Command messages.
func Commands(ctx context.Context, r *Reader, a, b cas.Digest) ([]Change, error) {
	var x, y repb.Command
	if err := errors.Join(cas.ReadProto(ctx, r.Store, a, &x), cas.ReadProto(ctx, r.Store, b, &y)); err != nil {
		return nil, err
	}
	all := slices.Concat(commands(&x, &y), properties("platform", x.Platform, y.Platform))
	return orEncoding(all, "command", a, b), nil
}

// orEncoding returns all or, if it is empty though the digests differ, a change that says so: the messages may differ
// in order, duplicates or unknown fields.
func orEncoding(all []Change, what string, a, b cas.Digest) []Change {
	if len(all) == 0 && a != b {
		all = append(all,
			Change{What: what + ", of equal parts in another order or encoding", A: a.String(), B: b.String()})
	}
	return all
}

// An Action is an Action message with its Command.
type Action struct {
	*repb.Action
	Digest  cas.Digest
	Command *repb.Command
}

// ReadAction reads an action and its command. It returns the errors of cas.ReadProto.
func ReadAction(ctx context.Context, s cas.Store, d cas.Digest) (*Action, error) {
	a := &Action{Action: &repb.Action{}, Digest: d, Command: &repb.Command{}}
	if err := cas.ReadProto(ctx, s, d, a.Action); err != nil {
		return nil, fmt.Errorf("action %s: %w", d, err)
	}
	command, err := cas.FromProto(d.Function(), a.CommandDigest)
	if err != nil {
		return nil, fmt.Errorf("action %s: command: %w", d, err)
	}
	if err := cas.ReadProto(ctx, s, command, a.Command); err != nil {
		return nil, fmt.Errorf("command of action %s: %w", d, err)
	}
	return a, nil
}

// Root returns the digest of the input root.
func (a *Action) Root() (cas.Digest, error) {
	d, err := cas.FromProto(a.Digest.Function(), a.InputRootDigest)
	if err != nil {
		return d, fmt.Errorf("action %s: input root: %w", a.Digest, err)
	}
	return d, nil
}

// Platform returns the platform in effect, nil if there is none.
func (a *Action) Platform() *repb.Platform {
	if a.Action.Platform != nil { // replaces the command's
		return a.Action.Platform
	}
	return a.Command.Platform
}

// Outputs returns the declared output paths.
func (a *Action) Outputs() []string { return outputs(a.Command) }

func outputs(c *repb.Command) []string {
	if len(c.OutputPaths) > 0 {
		return c.OutputPaths
	}
	return slices.Concat(c.OutputFiles, c.OutputDirectories)
}

// inputRoot returns a digest of an input root, and that it is absent if it is.
func (r *Reader) inputRoot(ctx context.Context, d cas.Digest) string {
	if _, err := r.Directory(d).Entries(ctx); errors.Is(err, cas.ErrNotFound) {
		return d.String() + " absent"
	}
	return d.String()
}

func (a *Action) timeout() string {
	if a.Timeout == nil {
		return ""
	}
	return a.Timeout.AsDuration().String()
}

func salt(s []byte) string {
	if len(s) == 0 {
		return ""
	}
	return quote(string(s))
}

// commands returns how b differs from a, except in the platform.
func commands(a, b *repb.Command) []Change {
	all := sequences("argument", a.Arguments, b.Arguments)
	env := func(c *repb.Command) map[string]string {
		m := map[string]string{}
		for _, v := range c.EnvironmentVariables {
			m[v.Name] = v.Value
		}
		return m
	}
	all = append(all, values("environment", env(a), env(b))...)
	if a.WorkingDirectory != b.WorkingDirectory {
		all = append(all, Change{What: "working directory", A: quote(a.WorkingDirectory), B: quote(b.WorkingDirectory)})
	}
	declared := func(list []string) map[string]string {
		m := map[string]string{}
		for _, s := range list {
			m[s] = "declared"
		}
		return m
	}
	all = append(all, values("declared output", declared(outputs(a)), declared(outputs(b)))...)
	all = append(all,
		values("output node property", declared(a.OutputNodeProperties), declared(b.OutputNodeProperties))...)
	if a.OutputDirectoryFormat != b.OutputDirectoryFormat {
		all = append(
			all,
			Change{
				What: "output directory format",
				A:    a.OutputDirectoryFormat.String(),
				B:    b.OutputDirectoryFormat.String(),
			},
		)
	}
	if all == nil && !slices.Equal(outputs(a), outputs(b)) {
		all = append(all, Change{What: "order of declared outputs", A: "another", B: "another"})
	}
	return all
}

// properties returns how two platforms differ. A name may have several values.
func properties(what string, a, b *repb.Platform) []Change {
	of := func(p *repb.Platform) map[string]string {
		values := map[string][]string{}
		for _, q := range p.GetProperties() {
			values[q.Name] = append(values[q.Name], q.Value)
		}
		m := map[string]string{}
		for name, list := range values {
			m[name] = strings.Join(list, ", ")
		}
		return m
	}
	return values(what, of(a), of(b))
}

// values returns the names whose values differ, sorted.
func values(what string, a, b map[string]string) []Change {
	names := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(names)
	var all []Change
	for _, name := range slices.Compact(names) {
		x, inA := a[name]
		y, inB := b[name]
		if inA == inB && x == y {
			continue
		}
		c := Change{What: what, Name: quote(name)}
		if inA {
			c.A = quote(x)
		}
		if inB {
			c.B = quote(y)
		}
		if inA && inB {
			c.A, c.B = differing(x, y)
		}
		all = append(all, c)
	}
	return all
}

// differing returns two different texts, quoted. Of long ones it omits most of the common prefix.
func differing(a, b string) (string, string) {
	const context = 40
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	if n > context && (len(a) > maxText || len(b) > maxText) {
		excerpt := func(s string) string {
			return "..." + printable.Quote(s[n-context:], maxText-len("..."))
		}
		return excerpt(a), excerpt(b)
	}
	return quote(a), quote(b)
}

// maxListed limits the items of one hunk that are listed one by one.
const maxListed = 2000

// sequences returns how list b differs from list a. Changes are named by their position in a or, if a has none, in b,
// counted from 1.
func sequences(what string, a, b []string) []Change {
	var all []Change
	for _, h := range listdiff.Hunks(a, b) {
		n, m := h.EndA-h.A, h.EndB-h.B
		switch {
		case h.Same:
			continue
		case max(n, m) > maxListed:
			c := Change{
				What: what,
				Name: strconv.Itoa(h.A + 1),
				A:    fmt.Sprintf("%d others", n),
				B:    fmt.Sprintf("%d others", m),
			}
			all = append(all, c)
			continue
		}
		for i := range max(n, m) {
			if len(all) > maxChanges {
				return all
			}
			c := Change{What: what, Name: strconv.Itoa(h.A + i + 1)}
			switch {
			case i >= n:
				c.Name, c.B = strconv.Itoa(h.B+i+1), quote(b[h.B+i])
			case i >= m:
				c.A = quote(a[h.A+i])
			default:
				c.A, c.B = differing(a[h.A+i], b[h.B+i])
			}
			all = append(all, c)
		}
	}
	return all
}

// Results returns how result b differs from result a in exit code, outputs, stdout and stderr. Their digests are of
// function f. It ignores metadata. It fails if a digest is invalid.
func Results(ctx context.Context, r *Reader, f cas.Function, a, b *repb.ActionResult) ([]Change, error) {
	var all []Change
	if a.ExitCode != b.ExitCode {
		all = append(all, Change{What: "exit code", A: fmt.Sprint(a.ExitCode), B: fmt.Sprint(b.ExitCode)})
	}
	x, err := r.outputs(f, a)
	if err != nil {
		return nil, err
	}
	y, err := r.outputs(f, b)
	if err != nil {
		return nil, err
	}
	differ, err := Directories(ctx, "output", x, y)
	if err != nil {
		return nil, err
	}
	all = append(all, differ...)
	for _, log := range []struct {
		name       string
		rawA, rawB []byte
		dA, dB     *repb.Digest
	}{
		{"stdout", a.StdoutRaw, b.StdoutRaw, a.StdoutDigest, b.StdoutDigest},
		{"stderr", a.StderrRaw, b.StderrRaw, a.StderrDigest, b.StderrDigest},
	} {
		ea, errA := r.log(f, log.name, log.rawA, log.dA)
		eb, errB := r.log(f, log.name, log.rawB, log.dB)
		if err := errors.Join(errA, errB); err != nil {
			return nil, fmt.Errorf("%s: %w", log.name, err)
		}
		if ea.Digest != eb.Digest {
			all = append(all, Change{What: log.name, A: ea.text(), B: eb.text(), EntryA: ea, EntryB: eb})
		}
	}
	return all, nil
}

// log returns the entry of stdout or stderr.
func (r *Reader) log(f cas.Function, name string, raw []byte, d *repb.Digest) (*Entry, error) {
	if d == nil || len(raw) > 0 {
		e := memory(name, raw)
		e.Digest = f.Sum(raw)
		return e, nil
	}
	digest, err := cas.FromProto(f, d)
	return r.File(name, digest, false), err
}

// A pathList is a directory whose entries are named by paths.
type pathList []Entry

// Entries implements Directory.
func (l pathList) Entries(context.Context) ([]Entry, error) { return l, nil }

// outputs returns the outputs of a result as a directory.
func (r *Reader) outputs(f cas.Function, result *repb.ActionResult) (Directory, error) {
	var all pathList
	for _, o := range result.OutputFiles {
		d, err := cas.FromProto(f, o.Digest)
		if err != nil {
			return nil, fmt.Errorf("output %s: %w", quote(o.Path), err)
		}
		e := r.File(o.Path, d, o.IsExecutable)
		e.Properties = o.NodeProperties
		all = append(all, *e)
	}
	for _, o := range result.OutputDirectories {
		e := Entry{Name: o.Path}
		p := o.TreeDigest
		if p == nil {
			p = o.RootDirectoryDigest
		}
		d, err := cas.FromProto(f, p)
		if err != nil {
			return nil, fmt.Errorf("output %s: %w", quote(o.Path), err)
		}
		e.Digest, e.Directory = d, r.Directory(d)
		if o.TreeDigest != nil {
			e.Directory = r.Tree(d)
		}
		all = append(all, e)
	}
	links := slices.Concat(result.OutputSymlinks, result.OutputFileSymlinks, result.OutputDirectorySymlinks)
	for _, l := range links {
		e := Entry{Name: l.Path, Link: true, Target: l.Target, Properties: l.NodeProperties}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b Entry) bool { return a.Name == b.Name }), nil // a link may be listed twice
}
