// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Actions returns how action b differs from action a: in its command, environment, platform, timeout and inputs, which
// is why what is recorded for the one is not found for the other. Of two digests there is a change at least. It fails if one of the two, or its command, cannot be
// read. An input root that is absent is one change, which says so: who only uses a cache uploads no inputs.
func Actions(ctx context.Context, r *Reader, a, b cas.Digest) ([]Change, error) {
	x, err := readAction(ctx, r.Store, a)
	if err != nil {
		return nil, err
	}
	y, err := readAction(ctx, r.Store, b)
	if err != nil {
		return nil, err
	}
	all := slices.Concat(commands(x.command, y.command), properties("platform", x.platform(), y.platform()))
	for _, c := range []Change{
		{What: "timeout", A: x.timeout(), B: y.timeout()},
		{What: "do_not_cache", A: said(x.DoNotCache), B: said(y.DoNotCache)},
		{What: "salt", A: salt(x.Salt), B: salt(y.Salt)},
	} {
		if c.A != c.B {
			all = append(all, c)
		}
	}
	if a.Function() != b.Function() {
		all = append(all, Change{What: "digest function", A: a.Function().String(), B: b.Function().String()})
	}
	if x.root == y.root {
		return otherwise(all, "action", a, b), nil
	}
	inputs, err := Folders(ctx, "input", r.Directory(x.root), r.Directory(y.root))
	if errors.Is(err, cas.ErrNotFound) {
		inputs = append(inputs, Change{What: "input root", A: r.root(ctx, x), B: r.root(ctx, y)})
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
	return otherwise(slices.Concat(commands(&x, &y), properties("platform", x.Platform, y.Platform)), "command", a, b), nil
}

// otherwise returns all, or if there are none while the digests differ, that: there are orders, doublets and fields of which
// nothing is told, and still one message is not found by the digest of the other.
func otherwise(all []Change, what string, a, b cas.Digest) []Change {
	if len(all) == 0 && a != b {
		all = append(all, Change{What: what + ", of equal parts in another order or encoding", A: a.String(), B: b.String()})
	}
	return all
}

// An action is one with what it names.
type action struct {
	*repb.Action
	command *repb.Command
	root    cas.Digest
}

func readAction(ctx context.Context, s cas.Store, d cas.Digest) (*action, error) {
	a := &action{Action: &repb.Action{}, command: &repb.Command{}}
	if err := cas.ReadProto(ctx, s, d, a.Action); err != nil {
		return nil, fmt.Errorf("action %s: %w", d, err)
	}
	command, err := cas.FromProto(d.Function(), a.CommandDigest)
	if err != nil {
		return nil, fmt.Errorf("action %s: command: %w", d, err)
	}
	if err := cas.ReadProto(ctx, s, command, a.command); err != nil {
		return nil, fmt.Errorf("command of action %s: %w", d, err)
	}
	if a.root, err = cas.FromProto(d.Function(), a.InputRootDigest); err != nil {
		return nil, fmt.Errorf("action %s: input root: %w", d, err)
	}
	return a, nil
}

// root says which input root an action has, and whether it is absent.
func (r *Reader) root(ctx context.Context, a *action) string {
	if _, err := r.Directory(a.root).Entries(ctx); errors.Is(err, cas.ErrNotFound) {
		return a.root.String() + " absent"
	}
	return a.root.String()
}

// platform returns what the action asks for.
func (a *action) platform() *repb.Platform {
	if a.Platform != nil { // it replaces that of the command
		return a.Platform
	}
	return a.command.Platform
}

func (a *action) timeout() string {
	if a.Timeout == nil {
		return ""
	}
	return a.Timeout.AsDuration().String()
}

// outputs returns the paths that a command declares.
func outputs(c *repb.Command) []string {
	if len(c.OutputPaths) > 0 {
		return c.OutputPaths
	}
	return slices.Concat(c.OutputFiles, c.OutputDirectories)
}

func said(b bool) string {
	if b {
		return "true"
	}
	return "false"
}

func salt(s []byte) string {
	if len(s) == 0 {
		return ""
	}
	return quoted(string(s))
}

// commands returns how b differs from a, but for the platform.
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
		all = append(all, Change{What: "working directory", A: quoted(a.WorkingDirectory), B: quoted(b.WorkingDirectory)})
	}
	set := func(list []string) map[string]string {
		m := map[string]string{}
		for _, s := range list {
			m[s] = "declared"
		}
		return m
	}
	all = append(all, values("declared output", set(outputs(a)), set(outputs(b)))...)
	all = append(all, values("output node property", set(a.OutputNodeProperties), set(b.OutputNodeProperties))...)
	if a.OutputDirectoryFormat != b.OutputDirectoryFormat {
		all = append(all, Change{What: "output directory format", A: a.OutputDirectoryFormat.String(), B: b.OutputDirectoryFormat.String()})
	}
	if all == nil && !slices.Equal(outputs(a), outputs(b)) {
		all = append(all, Change{What: "order of declared outputs", A: "another", B: "another"})
	}
	return all
}

// properties returns how two platforms differ. One name may have several values.
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

// values returns the names that have another value in b than in a, or none, in their order.
func values(what string, a, b map[string]string) []Change {
	var names []string
	for name := range a {
		names = append(names, name)
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var all []Change
	for _, name := range names {
		x, inA := a[name]
		y, inB := b[name]
		if inA == inB && x == y {
			continue
		}
		c := Change{What: what, Name: quoted(name)}
		if inA {
			c.A = quoted(x)
		}
		if inB {
			c.B = quoted(y)
		}
		if inA && inB {
			c.A, c.B = differing(x, y)
		}
		all = append(all, c)
	}
	return all
}

// differing returns two texts that differ, quoted, each from a little before that on if they are long.
func differing(a, b string) (string, string) {
	const lead = 40
	if n := commonPrefix(a, b); n > lead && (len(a) > MaxText || len(b) > MaxText) {
		return shorten(cut + quoted(a[n-lead:])), shorten(cut + quoted(b[n-lead:]))
	}
	return quoted(a), quoted(b)
}

// maxAligned is up to how many arguments that differ are aligned: it costs the square of that.
const maxAligned = 2000

// sequences returns how list b differs from list a, by the number of the place in a, or in b where a has nothing: from 1.
func sequences(what string, a, b []string) []Change {
	start := 0
	for start < len(a) && start < len(b) && a[start] == b[start] {
		start++
	}
	endA, endB := len(a), len(b)
	for endA > start && endB > start && a[endA-1] == b[endB-1] {
		endA, endB = endA-1, endB-1
	}
	var all []Change
	add := func(i, j int) { // the numbers of what is not the same, -1 where there is nothing
		if len(all) > MaxChanges {
			return
		}
		c := Change{What: what}
		switch {
		case i < 0:
			c.Name, c.B = strconv.Itoa(j+1), quoted(b[j])
		case j < 0:
			c.Name, c.A = strconv.Itoa(i+1), quoted(a[i])
		default:
			c.Name = strconv.Itoa(i + 1)
			c.A, c.B = differing(a[i], b[j])
		}
		all = append(all, c)
	}
	n, m := endA-start, endB-start
	if n > maxAligned || m > maxAligned {
		return append(all, Change{What: what, Name: strconv.Itoa(start + 1), A: fmt.Sprintf("%d others", n), B: fmt.Sprintf("%d others", m)})
	}
	align(a[start:endA], b[start:endB], func(i, j int) {
		if i >= 0 {
			i += start
		}
		if j >= 0 {
			j += start
		}
		add(i, j)
	})
	return all
}

// align calls visit for what is not in a longest common part of a and b: pairs that stand in for each other, and then what
// only one has, with -1 for the other.
func align(a, b []string, visit func(i, j int)) {
	x, y := numbered(a, b)
	// length[i][j] is that of the longest common part of a[i:] and b[j:].
	length := make([][]uint16, len(a)+1)
	for i := range length {
		length[i] = make([]uint16, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if x[i] == y[j] {
				length[i][j] = length[i+1][j+1] + 1
			} else {
				length[i][j] = max(length[i+1][j], length[i][j+1])
			}
		}
	}
	flush := func(i, endI, j, endJ int) {
		for ; i < endI && j < endJ; i, j = i+1, j+1 {
			visit(i, j)
		}
		for ; i < endI; i++ {
			visit(i, -1)
		}
		for ; j < endJ; j++ {
			visit(-1, j)
		}
	}
	i, j, fromI, fromJ := 0, 0, 0, 0
	for i < len(a) && j < len(b) {
		switch {
		case x[i] == y[j]:
			flush(fromI, i, fromJ, j)
			i, j = i+1, j+1
			fromI, fromJ = i, j
		case length[i+1][j] >= length[i][j+1]:
			i++
		default:
			j++
		}
	}
	flush(fromI, len(a), fromJ, len(b))
}

// numbered returns a number for each text, the same for the same, which takes no time to compare however long it is.
func numbered(a, b []string) (x, y []int) {
	known := map[string]int{}
	of := func(texts []string) []int {
		ns := make([]int, len(texts))
		for i, text := range texts {
			if _, ok := known[text]; !ok {
				known[text] = len(known)
			}
			ns[i] = known[text]
		}
		return ns
	}
	return of(a), of(b)
}

// Results returns how result b differs from result a: in exit code, outputs, stdout and stderr. Digests are of function f. It says
// nothing of what else is said of the runs. It fails if a digest is none.
func Results(ctx context.Context, r *Reader, f cas.Function, a, b *repb.ActionResult) ([]Change, error) {
	var all []Change
	if a.ExitCode != b.ExitCode {
		all = append(all, Change{What: "exit code", A: fmt.Sprint(a.ExitCode), B: fmt.Sprint(b.ExitCode)})
	}
	x, err := r.outputs(ctx, f, a)
	if err != nil {
		return nil, err
	}
	y, err := r.outputs(ctx, f, b)
	if err != nil {
		return nil, err
	}
	differ, err := Folders(ctx, "output", x, y)
	if err != nil {
		return nil, err
	}
	all = append(all, differ...)
	for _, log := range []struct {
		name       string
		rawA, rawB []byte
		dA, dB     *repb.Digest
	}{{"stdout", a.StdoutRaw, b.StdoutRaw, a.StdoutDigest, b.StdoutDigest}, {"stderr", a.StderrRaw, b.StderrRaw, a.StderrDigest, b.StderrDigest}} {
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

// log returns what a result says that the command has said.
func (r *Reader) log(f cas.Function, name string, raw []byte, d *repb.Digest) (*Entry, error) {
	if d == nil || len(raw) > 0 {
		e := memory(name, raw)
		e.Digest = f.Sum(raw)
		return e, nil
	}
	digest, err := cas.FromProto(f, d)
	return r.File(name, digest, false), err
}

// flat is a folder of entries whose names are paths.
type flat []Entry

// Entries implements Folder.
func (f flat) Entries(context.Context) ([]Entry, error) { return f, nil }

// outputs returns the outputs of a result as a folder, by their paths.
func (r *Reader) outputs(ctx context.Context, f cas.Function, result *repb.ActionResult) (Folder, error) {
	var all flat
	for _, o := range result.OutputFiles {
		d, err := cas.FromProto(f, o.Digest)
		if err != nil {
			return nil, fmt.Errorf("output %s: %w", quoted(o.Path), err)
		}
		e := r.File(o.Path, d, o.IsExecutable)
		e.Properties = nodeProperties(o.NodeProperties)
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
			return nil, fmt.Errorf("output %s: %w", quoted(o.Path), err)
		}
		e.Digest, e.Folder = d, r.Directory(d)
		if o.TreeDigest != nil {
			e.Folder = &boxed{r: r, digest: d}
		}
		all = append(all, e)
	}
	for _, links := range [][]*repb.OutputSymlink{result.OutputSymlinks, result.OutputFileSymlinks, result.OutputDirectorySymlinks} {
		for _, l := range links {
			all = append(all, Entry{Name: l.Path, Link: true, Target: l.Target, Properties: nodeProperties(l.NodeProperties)})
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b Entry) bool { return a.Name == b.Name }), nil // a link may be listed by two names
}

// boxed is the root of a Tree, which is read when it is looked at.
type boxed struct {
	r      *Reader
	digest cas.Digest
}

// Entries implements Folder.
func (b *boxed) Entries(ctx context.Context) ([]Entry, error) {
	t, err := b.r.Tree(ctx, b.digest)
	if err != nil {
		return nil, err
	}
	return t.Entries(ctx)
}
