// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// A Request is an action with everything it refers to, decoded and checked. Action, Command and Input may be
// shared and must not be changed.
type Request struct {
	Digest   cas.Digest
	Instance *cas.Instance
	Action   *repb.Action
	Command  *repb.Command
	Input    *tree.Input
	// Layout is where inputs and outputs will lie.
	Layout *tree.Layout
	// Timeout is the action's own, or the worker's if it states none.
	Timeout time.Duration
}

// fetch reads the action, and its result if one is recorded and may be used.
func (l *Local) fetch(ctx context.Context, t *Task) (*Request, *Outcome, error) {
	in, err := l.Instances(t.Instance)
	if err != nil {
		return nil, nil, err
	}
	if t.ActionBlob != nil {
		if err := tree.Add(l.inputs, in, t.Action, t.ActionBlob, new(repb.Action)); err != nil {
			return nil, nil, err
		}
	}
	req, err := l.Resolve(ctx, in, t.Action)
	if err != nil {
		return nil, nil, err
	}
	if t.SkipCacheLookup || t.oneOff() || req.Action.DoNotCache {
		return req, nil, nil
	}
	r, err := cas.LookupComplete(ctx, in, t.Action)
	if errors.Is(err, cas.ErrNotFound) {
		return req, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if r.ExitCode != 0 {
		return req, nil, nil // somebody else recorded it: this worker never does (rule 68)
	}
	out := &Outcome{Result: r, Cached: true}
	out.Manifest, out.StableHash = RecordedManifest(r)
	return req, out, nil
}

// Action reads an action, or has it from the worker's cache: it may be shared and must not be changed.
func (l *Local) Action(ctx context.Context, in *cas.Instance, action cas.Digest) (*repb.Action, error) {
	return tree.Read(ctx, l.inputs, in, action, new(repb.Action))
}

// Resolve reads and checks an action, its command and its input root before anything is spent on it.
// All blobs that are absent come back in one Fault of kind Missing, so that a client uploads them in
// one go; anything malformed is a Fault of kind Invalid that says what and where.
func (l *Local) Resolve(ctx context.Context, in *cas.Instance, action cas.Digest) (*Request, error) {
	req, err := l.resolve(ctx, in, action)
	if err != nil {
		return nil, fault(Fetch, err)
	}
	if d := req.Timeout; d > l.MaxTimeout {
		return nil, faultf(Invalid, "fetch: action %s asks for a timeout of %v; at most %v is permitted here", action, d, l.MaxTimeout)
	}
	if req.Timeout == 0 {
		req.Timeout = l.MaxTimeout
	}
	if !l.Fleet {
		l.ignoreProperties(req)
	}
	return req, nil
}

// properties returns the platform properties: Action.platform, if set, replaces Command.platform (rule 83).
func (req *Request) properties() []*repb.Platform_Property {
	if p := req.Action.Platform; p != nil {
		return p.Properties
	}
	return req.Command.Platform.GetProperties()
}

// demands returns the platform properties that are not ours, as Admission has them.
func (req *Request) demands() []Property {
	var all []Property
	for _, p := range req.properties() {
		if !ours(p.Name) {
			all = append(all, Property{p.Name, p.Value})
		}
	}
	slices.SortFunc(all, Property.Compare)
	return slices.Compact(all)
}

// ignoreProperties warns, once for each, of the platform properties of others: one machine serves every
// platform that it is asked for (rule 84).
func (l *Local) ignoreProperties(req *Request) {
	for _, property := range req.properties() {
		if ours(property.Name) {
			continue
		}
		l.mu.Lock()
		first := len(l.ignored) < maxIgnored && !l.ignored[property.Name]
		if first {
			l.ignored[property.Name] = true
		}
		l.mu.Unlock()
		if first {
			l.Log.Warn("platform property is ignored: this worker takes every action", "name", property.Name, "value", property.Value)
		}
	}
}

// maxIgnored bounds how many names of properties are remembered, since they are a client's words.
const maxIgnored = 100

// resolve is Resolve without the worker's own limits.
func (l *Local) resolve(ctx context.Context, in *cas.Instance, action cas.Digest) (*Request, error) {
	req := &Request{Digest: action, Instance: in}
	var err error
	if req.Action, err = l.Action(ctx, in, action); err != nil {
		return nil, absent(err, action)
	}
	command, root, err := parts(action, req.Action)
	if err != nil {
		return nil, err
	}
	// Both are read before either failure is told, so that the list of absent blobs is whole.
	var commandErr, treeErr error
	req.Command, commandErr = tree.Read(ctx, l.inputs, in, command, new(repb.Command))
	req.Input, treeErr = l.inputs.Load(ctx, in, root)
	if err := both(absent(commandErr, command), treeErr); err != nil {
		return nil, err
	}
	if req.Timeout, err = timeout(req.Action); err != nil {
		return nil, fmt.Errorf("action %s: %w", action, err)
	}
	outputs, dirs, err := checkCommand(req.Command)
	if err != nil {
		return nil, fmt.Errorf("command %s: %w", command, err)
	}
	if req.Layout, err = req.Input.Plan(req.Command.WorkingDirectory, outputs, dirs); err != nil {
		return nil, fmt.Errorf("command %s: %w", command, err)
	}
	return req, nil
}

// parts returns the digests of command and input root of the action a, which d names.
func parts(d cas.Digest, a *repb.Action) (command, root cas.Digest, err error) {
	if command, err = cas.FromProto(d.Function(), a.CommandDigest); err != nil {
		return command, root, fmt.Errorf("command_digest of action %s: %w", d, err)
	}
	if root, err = cas.FromProto(d.Function(), a.InputRootDigest); err != nil {
		return command, root, fmt.Errorf("input_root_digest of action %s: %w", d, err)
	}
	return command, root, nil
}

// both returns what says all that a and b say: of absent blobs one list.
func both(a, b error) error {
	var m, n *tree.MissingError
	if errors.As(a, &m) && errors.As(b, &n) {
		return &tree.MissingError{Blobs: slices.Concat(m.Blobs, n.Blobs)}
	}
	return errors.Join(a, b)
}

// absent turns a blob that was not found into a MissingError.
func absent(err error, d cas.Digest) error {
	if errors.Is(err, cas.ErrNotFound) {
		return &tree.MissingError{Blobs: []cas.Digest{d}}
	}
	return err
}

func timeout(a *repb.Action) (time.Duration, error) {
	if a.Timeout == nil {
		return 0, nil
	}
	if err := a.Timeout.CheckValid(); err != nil {
		return 0, invalidf("timeout: %v", err)
	}
	d := a.Timeout.AsDuration()
	if d < 0 {
		return 0, invalidf("timeout %v is negative", d)
	}
	return d, nil
}

// checkCommand returns ErrInvalid for a command that cannot be run as stated (rules 71, 76 to 82), and
// else the paths of its outputs relative to the input root, clean, sorted and each once, and which of
// them API 2.0 declares as directories.
func checkCommand(c *repb.Command) (outputs, dirs []string, err error) {
	if len(c.Arguments) == 0 || c.Arguments[0] == "" {
		return nil, nil, invalidf("arguments are empty")
	}
	for _, a := range c.Arguments {
		if strings.ContainsRune(a, 0) {
			return nil, nil, invalidf("argument %+.256q holds a NUL byte", a)
		}
	}
	names := map[string]bool{}
	for _, v := range c.EnvironmentVariables {
		if v.Name == "" || strings.ContainsAny(v.Name, "=\x00") || strings.ContainsRune(v.Value, 0) {
			return nil, nil, invalidf("environment variable %+.256q is malformed", v.Name)
		}
		if names[v.Name] {
			return nil, nil, invalidf("environment variable %s is set twice", v.Name)
		}
		names[v.Name] = true
	}
	for _, p := range c.OutputNodeProperties {
		if known := tree.NodeProperties(); !slices.Contains(known, p) {
			return nil, nil, invalidf("output_node_properties %+.100q: this server knows %q alone", p, known)
		}
	}
	if d := c.WorkingDirectory; d != "" && (path.IsAbs(d) || path.Clean(d) != d || escapes(d) || strings.ContainsRune(d, 0)) {
		return nil, nil, invalidf("working_directory %+.256q is not a clean path below the input root", d)
	}

	lists := []struct {
		field string
		paths []string
	}{{"output_paths", c.OutputPaths}}
	if len(c.OutputPaths) == 0 {
		lists[0].field, lists[0].paths = "output_files", c.OutputFiles
		lists = append(lists, lists[0])
		lists[1].field, lists[1].paths = "output_directories", c.OutputDirectories
	}
	seen := map[string]string{}
	for _, list := range lists {
		for _, p := range list.paths {
			clean, err := outputPath(c.WorkingDirectory, p, list.field)
			if err != nil {
				return nil, nil, err
			}
			if other, ok := seen[clean]; ok {
				return nil, nil, invalidf("%s %+.256q names the same path as %+.256q", list.field, p, other)
			}
			seen[clean] = p
			outputs = append(outputs, clean)
			if list.field == "output_directories" {
				dirs = append(dirs, clean)
			}
		}
	}
	slices.Sort(outputs)
	if len(c.OutputPaths) > 0 {
		return outputs, nil, nil
	}
	// API 2.0: no file may be the parent of another output (rule 79), nor of the working directory or that itself.
	for _, p := range c.OutputFiles {
		clean := path.Join(c.WorkingDirectory, p)
		below := clean + "/"
		if clean == "" || clean == "." || strings.HasPrefix(c.WorkingDirectory+"/", below) {
			return nil, nil, invalidf("output_files %+.256q is the working directory, or leads to it, and cannot be a file", p)
		}
		// Whatever lies below sorts at or after the path with its slash.
		i, _ := slices.BinarySearch(outputs, below)
		if i < len(outputs) && strings.HasPrefix(outputs[i], below) {
			return nil, nil, invalidf("output_files %+.256q is a parent of the output %+.256q", p, outputs[i])
		}
	}
	return outputs, dirs, nil
}

// outputPath returns p, which is relative to dir, relative to the input root.
func outputPath(dir, p, field string) (string, error) {
	if path.IsAbs(p) || strings.HasSuffix(p, "/") || strings.ContainsRune(p, 0) {
		return "", invalidf("%s %+.256q: a path is relative, without a trailing slash", field, p)
	}
	clean := path.Join(dir, p)
	if clean == "" {
		clean = "."
	}
	if escapes(clean) {
		return "", invalidf("%s %+.256q leads out of the input root", field, p)
	}
	return clean, nil
}

func escapes(clean string) bool { return clean == ".." || strings.HasPrefix(clean, "../") }

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", cas.ErrInvalid, fmt.Sprintf(format, args...))
}
