// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobview"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// maxLog limits the bytes of stdout and stderr, each, on a page.
const maxLog = 256 << 10

// actionData is the data of /a/NAME.
type actionData struct {
	Digest   string          `json:"digest"`
	Instance string          `json:"instance"`
	Target   string          `json:"target,omitempty"`
	Mnemonic string          `json:"mnemonic,omitempty"`
	Status   string          `json:"status"`
	Failed   bool            `json:"failed"`
	Message  []string        `json:"message,omitempty"` // of a failure
	Rerun    string          `json:"rerun"`             // a command line
	Stages   []stage         `json:"stages,omitempty"`
	Outputs  []output        `json:"outputs,omitempty"`
	Stdout   *log            `json:"stdout,omitempty"`
	Stderr   *log            `json:"stderr,omitempty"`
	Facts    *actions.Object `json:"facts"` // as of cloister action show --json
	// Shortened means that the command, the platform or the outputs are longer than what is shown.
	Shortened bool   `json:"shortened,omitempty"`
	Command   string `json:"command"` // digest

	Action *actions.Description `json:"-"`
	Text   string               `json:"-"` // of cloister action show
}

// A stage is a part of a run.
type stage struct {
	Name    string  `json:"name"`
	Begin   float64 `json:"begin_seconds"`
	Seconds float64 `json:"seconds"`
	Class   string  `json:"-"`
	X       int     `json:"-"`
	Width   int     `json:"-"`
}

// An output is an entry of a result.
type output struct {
	Path   string `json:"path"`
	Kind   string `json:"kind"`
	Digest string `json:"digest,omitempty"`
	Target string `json:"target,omitempty"` // of a symbolic link
	Size   int64  `json:"size,omitempty"`
}

// A log is what an action wrote, without escape sequences.
type log struct {
	Text   string `json:"text"`
	Size   int64  `json:"size"`
	More   bool   `json:"more,omitempty"` // than Text
	Digest string `json:"digest,omitempty"`
	Err    string `json:"error,omitempty"`
}

func showAction(r *request) (any, error) {
	named, err := r.from.Action(r.Context(), digestName(r.PathValue("name")))
	if err != nil {
		return nil, err
	}
	store, err := r.from.Open(r.Context())
	if err != nil {
		return nil, err
	}
	defer store.Close()
	a, err := actions.Describe(r.Context(), r.from, store, named.Digest, r.FormValue("failed") != "")
	if err != nil {
		return nil, r.from.Explain(err, 1)
	}
	d := &actionData{Digest: named.Digest.String(), Instance: store.Name(), Target: named.Target, Mnemonic: named.Mnemonic, Action: a}
	if command, err := cas.FromProto(named.Digest.Function(), a.Action.CommandDigest); err == nil {
		d.Command = command.String()
	}
	d.Shortened = shortenAction(a)
	if d.Facts, err = a.Object(); err != nil {
		return nil, err
	}
	var text strings.Builder
	if err := a.WriteText(&text); err != nil {
		return nil, err
	}
	d.Text, d.Rerun = strings.ToValidUTF8(text.String()[:min(text.Len(), maxLog)], ""), rerun(r.from, d)
	d.Shortened = d.Shortened || len(d.Text) < text.Len()
	d.status()
	if a.Result != nil {
		d.result(r.Context(), store, a.Result)
	}
	return d, nil
}

// A budget bounds texts of the page of an action.
type budget struct {
	entries, bytes int
	less           bool // something did not fit
}

// next reports whether another entry fits.
func (b *budget) next() bool {
	if b.entries == 0 || b.bytes == 0 {
		b.less = true
		return false
	}
	b.entries--
	return true
}

// cut returns the beginning of a text.
func (b *budget) cut(s string) string {
	if len(s) > b.bytes {
		s, b.less = strings.ToValidUTF8(s[:b.bytes], ""), true
	}
	b.bytes -= len(s)
	return s
}

// fit returns the first entries of a list, with their texts cut.
func fit[T any](b *budget, all []T, texts func(T) []*string) []T {
	for i, e := range all {
		if !b.next() {
			return all[:i]
		}
		for _, s := range texts(e) {
			*s = b.cut(*s)
		}
	}
	return all
}

// shortenAction removes what a page does not show of a large action, and reports whether there is any.
func shortenAction(a *actions.Description) (less bool) {
	list := func(b *budget, all []string) []string {
		for i := range all {
			if !b.next() {
				return all[:i]
			}
			all[i] = b.cut(all[i])
		}
		return all
	}
	platform := func(b *budget, p *repb.Platform) {
		if p != nil {
			p.Properties = fit(b, p.Properties, func(q *repb.Platform_Property) []*string { return []*string{&q.Name, &q.Value} })
		}
	}
	c := a.Command
	command, variables, rest := &budget{5 * blobview.MaxRows, maxLog / 2, false}, &budget{blobview.MaxRows, maxLog / 4, false}, &budget{blobview.MaxRows, maxLog / 4, false}
	c.Arguments = list(command, c.Arguments)
	c.EnvironmentVariables = fit(variables, c.EnvironmentVariables, func(v *repb.Command_EnvironmentVariable) []*string {
		return []*string{&v.Name, &v.Value}
	})
	c.WorkingDirectory = rest.cut(c.WorkingDirectory)
	platform(rest, c.Platform)
	platform(rest, a.Action.Action.Platform)
	c.OutputPaths, c.OutputFiles = list(rest, c.OutputPaths), list(rest, c.OutputFiles)
	c.OutputDirectories, c.OutputNodeProperties = list(rest, c.OutputDirectories), list(rest, c.OutputNodeProperties)
	outputs := &budget{blobview.MaxRows, maxLog / 4, false}
	if r := a.Result; r != nil {
		r.OutputFiles = fit(outputs, r.OutputFiles, func(f *repb.OutputFile) []*string { return []*string{&f.Path} })
		r.OutputDirectories = fit(outputs, r.OutputDirectories, func(d *repb.OutputDirectory) []*string { return []*string{&d.Path} })
		for _, links := range []*[]*repb.OutputSymlink{&r.OutputSymlinks, &r.OutputFileSymlinks, &r.OutputDirectorySymlinks} {
			*links = fit(outputs, *links, func(l *repb.OutputSymlink) []*string { return []*string{&l.Path, &l.Target} })
		}
	}
	return command.less || variables.less || rest.less || outputs.less
}

// rerun returns the command line that reruns an action.
func rerun(from *client.Server, d *actionData) string {
	words := []string{"cloister", "run", "--action", d.Digest, "--server", from.Address}
	if d.Instance != "" {
		words = append(words, "--instance", d.Instance)
	}
	return render.QuoteAll(words)
}

// status describes how the action ended in one sentence.
func (d *actionData) status() {
	r := d.Action.Result
	failure, lines := d.Action.Failure()
	switch {
	case failure != "":
		d.Failed, d.Status = true, "Failed: "+failure+"."
		d.Message = slices.DeleteFunc(lines, func(l string) bool { return l == "" })
		d.Message = d.Message[:min(len(d.Message), blobview.MaxRows)]
	case r == nil:
		d.Status = "No result is recorded."
	case r.ExitCode != 0:
		d.Failed, d.Status = true, fmt.Sprintf("Failed with exit code %d.", r.ExitCode)
	default:
		d.Status = "Succeeded."
	}
	if worker := r.GetExecutionMetadata().GetWorker(); worker != "" {
		d.Status = strings.TrimSuffix(d.Status, ".") + " on " + render.Quote(worker) + "."
	}
}

// result adds the outputs, stages and logs of r.
func (d *actionData) result(ctx context.Context, store *remote.Store, r *repb.ActionResult) {
	name := func(p *repb.Digest) string {
		if v, err := cas.FromProto(d.Action.Digest.Function(), p); err == nil {
			return v.String()
		}
		return ""
	}
	for _, f := range r.OutputFiles {
		kind := "file"
		if f.IsExecutable {
			kind = "executable"
		}
		d.Outputs = append(d.Outputs, output{Path: f.Path, Kind: kind, Digest: name(f.Digest), Size: f.Digest.GetSizeBytes()})
	}
	for _, o := range r.OutputDirectories {
		root := o.TreeDigest
		if root == nil {
			root = o.RootDirectoryDigest
		}
		d.Outputs = append(d.Outputs, output{Path: o.Path, Kind: "directory", Digest: name(root)})
	}
	for _, l := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		d.Outputs = append(d.Outputs, output{Path: l.Path, Kind: "link", Target: l.Target})
	}
	d.Stages = stagesOf(r.ExecutionMetadata)
	d.Stdout = readLog(ctx, store, d.Action.Digest.Function(), r.StdoutRaw, r.StdoutDigest)
	d.Stderr = readLog(ctx, store, d.Action.Digest.Function(), r.StderrRaw, r.StderrDigest)
}

// stagesOf returns the parts of a run whose times are known.
func stagesOf(m *repb.ExecutedActionMetadata) []stage {
	spans := []struct {
		name, class string
		from, to    *timestamppb.Timestamp
	}{
		{"wait", "s0", m.GetQueuedTimestamp(), m.GetWorkerStartTimestamp()},
		{"fetch inputs", "s1", m.GetInputFetchStartTimestamp(), m.GetInputFetchCompletedTimestamp()},
		{"run", "s3", m.GetExecutionStartTimestamp(), m.GetExecutionCompletedTimestamp()},
		{"upload outputs", "s5", m.GetOutputUploadStartTimestamp(), m.GetOutputUploadCompletedTimestamp()},
	}
	var all []stage
	var first *timestamppb.Timestamp
	total := 0.001
	for _, s := range spans {
		if s.from == nil || s.to == nil {
			continue
		}
		if first == nil {
			first = s.from
		}
		begin := max(0, s.from.AsTime().Sub(first.AsTime()).Seconds())
		took := max(0, s.to.AsTime().Sub(s.from.AsTime()).Seconds())
		all = append(all, stage{Name: s.name, Class: s.class, Begin: begin, Seconds: took})
		total = max(total, begin+took)
	}
	for i := range all {
		all[i].X, all[i].Width = int(1000*all[i].Begin/total), max(1, int(1000*all[i].Seconds/total))
	}
	return all
}

// readLog returns the beginning of what an action wrote, nil if that is nothing.
func readLog(ctx context.Context, store cas.Store, f cas.Function, raw []byte, p *repb.Digest) *log {
	if len(raw) == 0 && p.GetSizeBytes() == 0 {
		return nil
	}
	l := &log{Size: int64(len(raw))}
	if len(raw) == 0 {
		d, err := cas.FromProto(f, p)
		if err == nil {
			l.Digest, l.Size = d.String(), d.Size()
			raw, err = head(ctx, store, d)
		}
		if errors.Is(err, cas.ErrNotFound) {
			l.Err = "the server has evicted it"
		} else if err != nil {
			l.Err = err.Error()
		}
	}
	l.Text, l.More = blobview.Plain(string(raw[:min(len(raw), maxLog)])), l.Size > maxLog
	return l
}

// head returns the first bytes of a blob.
func head(ctx context.Context, store cas.Store, d cas.Digest) ([]byte, error) {
	r, err := store.Open(ctx, d, 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, maxLog))
}
