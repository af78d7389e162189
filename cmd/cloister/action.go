// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
	_ "github.com/cloister-build/cloister/proto/cloister/v1" // what results carry, so that it can be shown
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// origin is the flags that say where an action is stored.
type origin struct {
	cas      string
	instance string
	who      identity
}

func (o *origin) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.cas, "cas", "grpc://"+defaultListen, "the server, of whatever make: grpc://HOST:PORT or grpcs://HOST:PORT")
	f.StringVar(&o.instance, "instance", "", "name of the instance at the server")
	o.who.register(f, "")
}

// open connects to the server. The caller closes what it returns.
func (o *origin) open(ctx context.Context) (*remote.Store, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	options, err := o.who.options(o.cas)
	if err != nil {
		return nil, err
	}
	c, err := remote.Dial(ctx, strings.TrimRight(o.cas, "/")+"/"+url.PathEscape(o.instance), options...)
	switch {
	case errors.Is(err, remote.ErrAddress), errors.Is(err, cas.ErrInvalid):
		return nil, newExit(exitUsage, fmt.Errorf("--cas, --instance: %w", err))
	case errors.Is(err, os.ErrPermission): // it was reached, and refuses
		return nil, newExit(exitNo, err)
	case err != nil:
		return nil, newExit(exitConnect, fmt.Errorf("%w; name the server with --cas", err))
	}
	return c.Store("")
}

// explain gives err, of reading an action from the server, its exit code.
func (o *origin) explain(err error, code int) error {
	var e *exit
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, cas.ErrNotFound):
		return newExit(exitAbsent, err)
	case errors.Is(err, cas.ErrUnavailable):
		return newExit(exitConnect, err)
	}
	return newExit(code, err)
}

// absent is the error for blobs of an action that the server does not have.
func (o *origin) absent(action cas.Digest, blobs []cas.Digest) error {
	const named = 10
	var list strings.Builder
	for i, d := range blobs[:min(named, len(blobs))] {
		if i > 0 {
			list.WriteString(", ")
		}
		list.WriteString(d.String())
	}
	if len(blobs) > named {
		fmt.Fprintf(&list, " and %d more", len(blobs)-named)
	}
	return newExit(exitAbsent, fmt.Errorf("action %s: absent from %s, instance %q: %s; "+
		"execute it there once more, so that its client uploads them", action, o.cas, o.instance, &list))
}

func actionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "action",
		Short: "Shows actions that a server holds",
		Example: `  cloister action ls
  cloister action show 9f2c...e1/142
  cloister action log -f 9f2c...e1/142`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(actionLsCommand(), actionShowCommand(), actionLogCommand())
	return cmd
}

func actionShowCommand() *cobra.Command {
	var from origin
	var asJSON, record bool
	cmd := &cobra.Command{
		Use:   "show DIGEST [--cas URL] [--instance NAME] [--json | --manifest]",
		Short: "Says what an action is, and what became of it",
		Long: `Show prints the command of an action, its environment, platform and inputs, and the result that the
action cache has of it. DIGEST is HASH/SIZE, as messages and logs print it; at a server that keeps a
history also the beginning of that, of at least 8 digits, or ^1 for the action that was asked for last,
^2 for the one before.

With --manifest it prints the record of the run that made the result, and nothing else: the text whose
stable hash two equal runs have in common.

It exits with 4 if the action, its command or the manifest is absent, and with 5 if the server cannot be reached.`,
		Example: `  cloister action show e3b0...55/142
  cloister action show ^1
  cloister action show ^1 --manifest | sed '/^volatile$/,$d' | sha256sum    # the stable hash
  cloister action show e3b0c442 --cas grpc://build.example.com:8980 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			what, err := from.subject(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			store, err := from.open(cmd.Context())
			if err != nil {
				return err
			}
			defer store.Close()
			a, err := describe(cmd.Context(), store, what.digest)
			if err != nil {
				return from.explain(err, 1)
			}
			if record {
				text, err := a.manifest(cmd.Context(), store)
				if err != nil {
					return from.explain(err, 1)
				}
				_, err = io.WriteString(cmd.OutOrStdout(), text)
				return err
			}
			if asJSON {
				return a.json(cmd.OutOrStdout())
			}
			return a.text(cmd.OutOrStdout())
		},
	}
	from.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with the messages of the API in it")
	cmd.Flags().BoolVar(&record, "manifest", false, "print the manifest of the run that made the result")
	cmd.MarkFlagsMutuallyExclusive("json", "manifest")
	return cmd
}

// A description is an action as it is stored, with its result, if there is one.
type description struct {
	digest   cas.Digest
	instance string
	action   repb.Action
	command  repb.Command
	input    *tree.Input // nil if inputErr is not
	inputErr error
	result   *repb.ActionResult // nil if there is none
}

// describe reads an action. An input root that is absent or malformed is part of what it says.
func describe(ctx context.Context, s *remote.Store, digest cas.Digest) (*description, error) {
	a := &description{digest: digest, instance: s.Name()}
	if err := cas.ReadProto(ctx, s, digest, &a.action); err != nil {
		return nil, fmt.Errorf("action %s: %w", digest, err)
	}
	command, err := cas.FromProto(digest.Function(), a.action.CommandDigest)
	if err != nil {
		return nil, fmt.Errorf("action %s: command: %w", digest, err)
	}
	if err := cas.ReadProto(ctx, s, command, &a.command); err != nil {
		return nil, fmt.Errorf("command of action %s: %w", digest, err)
	}
	root, err := cas.FromProto(digest.Function(), a.action.InputRootDigest)
	if err == nil {
		a.input, err = tree.Load(ctx, s, root)
	}
	a.inputErr = err
	a.result, err = s.Lookup(ctx, digest)
	if err != nil && !errors.Is(err, cas.ErrNotFound) {
		return nil, err
	}
	return a, nil
}

// platform returns what the action asks for, as NAME=VALUE.
func (a *description) platform() []string {
	p := a.action.Platform // if set, it replaces that of the command
	if p == nil {
		p = a.command.Platform
	}
	var properties []string
	for _, q := range p.GetProperties() {
		properties = append(properties, quote(q.Name)+"="+quote(q.Value))
	}
	return properties
}

// outputs returns the paths that the command declares.
func (a *description) outputs() []string {
	if len(a.command.OutputPaths) > 0 {
		return a.command.OutputPaths
	}
	return slices.Concat(a.command.OutputFiles, a.command.OutputDirectories)
}

// text prints a for a person. All that a client chose is quoted, so that it can neither be taken for
// something else nor command the terminal.
func (a *description) text(w io.Writer) error {
	p := &page{w: w}
	p.line("action", a.digest.String())
	if a.instance != "" {
		p.line("instance", quote(a.instance))
	}
	p.line("command", quoteScript(a.command.Arguments))
	if a.command.WorkingDirectory != "" {
		p.line("directory", quote(a.command.WorkingDirectory))
	}
	for _, v := range a.command.EnvironmentVariables {
		p.line("environment", quote(v.Name)+"="+quote(v.Value))
	}
	p.lines("platform", a.platform())
	root := fmt.Sprintf("%s/%d", a.action.InputRootDigest.GetHash(), a.action.InputRootDigest.GetSizeBytes())
	if a.inputErr != nil {
		p.line("inputs", fmt.Sprintf("%s  cannot be read: %v", quote(root), a.inputErr))
	} else {
		p.line("inputs", fmt.Sprintf("%s  %d files, %s", root, a.input.Files(), sandbox.Bytes(a.input.Bytes())))
	}
	for _, o := range a.outputs() {
		p.line("declares", quote(o))
	}
	if a.action.Timeout != nil {
		p.line("timeout", a.action.Timeout.AsDuration().String())
	}
	if a.action.DoNotCache {
		p.line("cache", "do_not_cache: its result is not recorded")
	}
	if a.result == nil {
		p.line("result", "none is recorded")
		return p.err
	}
	p.result(a.result)
	return p.err
}

// A page prints lines of a name and a value, the name of equal ones once.
type page struct {
	w    io.Writer
	last string
	err  error // of the first line that could not be written
}

func (p *page) line(name, value string) {
	if name == p.last {
		name = ""
	} else {
		p.last = name
	}
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, "%-12s %s\n", name, value)
	}
}

func (p *page) lines(name string, values []string) {
	for _, v := range values {
		p.line(name, v)
	}
}

func (p *page) result(r *repb.ActionResult) {
	p.line("result", fmt.Sprintf("exit code %d", r.ExitCode))
	name := func(d *repb.Digest) string { return fmt.Sprintf("%s/%d", d.GetHash(), d.GetSizeBytes()) }
	for _, f := range r.OutputFiles {
		kind := ""
		if f.IsExecutable {
			kind = "  executable"
		}
		p.line("output", fmt.Sprintf("%s  %s%s", quote(f.Path), quote(name(f.Digest)), kind))
	}
	for _, d := range r.OutputDirectories {
		digest := d.TreeDigest
		if digest == nil {
			digest = d.RootDirectoryDigest
		}
		p.line("output", fmt.Sprintf("%s/  %s", quote(d.Path), quote(name(digest))))
	}
	for _, l := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		p.line("output", fmt.Sprintf("%s -> %s", quote(l.Path), quote(l.Target)))
	}
	for _, log := range []struct {
		name   string
		digest *repb.Digest
	}{{"stdout", r.StdoutDigest}, {"stderr", r.StderrDigest}} {
		if log.digest.GetSizeBytes() > 0 {
			p.line(log.name, quote(name(log.digest)))
		}
	}
	m := r.ExecutionMetadata
	if m == nil {
		return
	}
	if text, stable := worker.RecordedManifest(r); stable != "" {
		p.line("stable hash", quote(stable))
		if !text.IsZero() {
			p.line("manifest", text.String())
		}
	}
	p.line("worker", quote(m.Worker))
	if m.QueuedTimestamp != nil {
		p.line("queued", m.QueuedTimestamp.AsTime().Format(time.RFC3339Nano))
	}
	span := func(name string, from, to *timestamppb.Timestamp) {
		if from != nil && to != nil {
			p.line(name, to.AsTime().Sub(from.AsTime()).String())
		}
	}
	span("waited", m.QueuedTimestamp, m.WorkerStartTimestamp)
	span("fetched", m.InputFetchStartTimestamp, m.InputFetchCompletedTimestamp)
	span("ran", m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp)
	span("uploaded", m.OutputUploadStartTimestamp, m.OutputUploadCompletedTimestamp)
	for _, aux := range m.AuxiliaryMetadata {
		p.message(aux)
	}
}

// message prints what a worker added to a result, whatever it is.
func (p *page) message(aux *anypb.Any) {
	m, err := aux.UnmarshalNew()
	if err != nil {
		p.line("metadata", fmt.Sprintf("%s  %d bytes of a type that is not known here", quote(aux.TypeUrl), len(aux.Value)))
		return
	}
	p.line("metadata", string(m.ProtoReflect().Descriptor().FullName()))
	p.fields("  ", m.ProtoReflect())
}

// fields prints the fields of m that are set, in the order of their declaration, so that one that is new
// shows by itself.
func (p *page) fields(prefix string, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := prefix + string(f.Name())
		switch {
		case !m.Has(f):
		case f.IsList():
			list := m.Get(f).List()
			for j := range list.Len() {
				p.value(fmt.Sprintf("%s[%d]", name, j), f, list.Get(j))
			}
		case f.IsMap():
			p.line("metadata", fmt.Sprintf("%s %d entries", name, m.Get(f).Map().Len()))
		default:
			p.value(name, f, m.Get(f))
		}
	}
}

func (p *page) value(name string, f protoreflect.FieldDescriptor, v protoreflect.Value) {
	text := fmt.Sprint(v.Interface())
	if f.Message() != nil {
		switch m := v.Message().Interface().(type) {
		case *durationpb.Duration:
			text = m.AsDuration().String()
		case *timestamppb.Timestamp:
			text = m.AsTime().Format(time.RFC3339Nano)
		default:
			p.fields(name+".", v.Message())
			return
		}
	} else if f.Enum() != nil {
		if e := f.Enum().Values().ByNumber(v.Enum()); e != nil {
			text = string(e.Name())
		}
	}
	p.line("metadata", name+" "+quote(text))
}

// json prints a as one object: the messages of the API as they map to JSON.
func (a *description) json(w io.Writer) error {
	o := map[string]any{"digest": a.digest.String(), "instance": a.instance}
	messages := map[string]proto.Message{"action": &a.action, "command": &a.command}
	if a.inputErr != nil {
		o["input"] = map[string]any{"error": a.inputErr.Error()}
	} else {
		o["input"] = map[string]any{"files": a.input.Files(), "bytes": a.input.Bytes()}
	}
	if a.result != nil {
		// A type that is not known here cannot be mapped, and must not hide the rest.
		var aux []any
		for _, m := range a.result.ExecutionMetadata.GetAuxiliaryMetadata() {
			if b, err := protojson.Marshal(m); err == nil {
				aux = append(aux, json.RawMessage(b))
			} else {
				aux = append(aux, map[string]string{"@type": m.TypeUrl, "encoded": base64.StdEncoding.EncodeToString(m.Value)})
			}
		}
		if aux != nil {
			a.result.ExecutionMetadata.AuxiliaryMetadata = nil
			o["auxiliaryMetadata"] = aux
		}
		messages["result"] = a.result
	}
	for _, name := range slices.Sorted(maps.Keys(messages)) {
		b, err := protojson.Marshal(messages[name])
		if err != nil {
			return newExit(exitNo, fmt.Errorf("%s of %s: %w", name, a.digest, err))
		}
		o[name] = json.RawMessage(b)
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(o)
}

// quoteAll returns a command as a line that a shell reads as the same words.
func quoteAll(args []string) string { return joined(args, quote) }

// quoteScript is quoteAll for a command that people read: lines of a script stay lines.
func quoteScript(args []string) string { return joined(args, quoteWord) }

func joined(args []string, quote func(string) string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = quote(a)
	}
	return strings.Join(quoted, " ")
}

// quote returns s as one word of a shell, in one line: what follows a line end in it would look like a line of ours. What
// a terminal would not show as it is becomes an escape, which shells read in $'...'.
func quote(s string) string {
	if strings.Contains(s, "\n") {
		return quoteEscaped(s)
	}
	return quoteWord(s)
}

// quoteWord is quote, but that a line end stays one.
func quoteWord(s string) string {
	plain := s != ""
	for _, r := range s {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) && r != '\n' {
			return quoteEscaped(s)
		}
		plain = plain && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("@%+=:,./-_", r))
	}
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func quoteEscaped(s string) string {
	var b strings.Builder
	b.WriteString("$'")
	for i := range len(s) {
		switch c := s[i]; {
		case c == '\'' || c == '\\':
			b.WriteString(`\` + string(rune(c)))
		case c == '\n':
			b.WriteString(`\n`)
		case c >= ' ' && c <= '~':
			b.WriteByte(c)
		default:
			// Three digits, so that what follows is not read as one more.
			b.WriteString(`\` + strconv.FormatUint(uint64(c)|1<<9, 8)[1:])
		}
	}
	return b.String() + "'"
}
