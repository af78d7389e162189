// SPDX-License-Identifier: Apache-2.0

// Package actions describes, lists and follows the actions of a server.
package actions

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// A Description is a stored action, with its result if there is one.
type Description struct {
	*changes.Action
	Instance string
	Input    *tree.Input // nil if InputErr is set
	InputErr error
	Result   *repb.ActionResult // nil if there is none
	failure  *failure           // with this result; nil if it comes from the action cache
}

// Describe reads an action and the result of its latest run, or with failed that of its latest failure. An absent or
// malformed input root does not fail it, but is part of the description.
func Describe(ctx context.Context, from *client.Server, s *remote.Store, digest cas.Digest, failed bool) (*Description, error) {
	action, err := changes.ReadAction(ctx, s, digest)
	if err != nil {
		return nil, err
	}
	a := &Description{Action: action, Instance: s.Name()}
	root, err := a.Root()
	if err == nil {
		a.Input, err = tree.Load(ctx, s, root)
	}
	a.InputErr = err
	if a.failure, err = failureOf(ctx, from, digest, failed); err != nil {
		return nil, err
	}
	if a.failure != nil {
		err = a.failure.read(ctx, s)
		a.Result = a.failure.result
		return a, err
	}
	a.Result, err = s.Lookup(ctx, digest)
	if err != nil && !errors.Is(err, cas.ErrNotFound) {
		return nil, err
	}
	return a, nil
}

// WriteText prints a for a person, with everything that a client chose quoted.
func (a *Description) WriteText(w io.Writer) error {
	p := &render.Page{W: w}
	p.Line("action", a.Digest.String())
	if a.Instance != "" {
		p.Line("instance", render.Quote(a.Instance))
	}
	p.Line("command", render.QuoteScript(a.Command.Arguments))
	if a.Command.WorkingDirectory != "" {
		p.Line("directory", render.Quote(a.Command.WorkingDirectory))
	}
	for _, v := range a.Command.EnvironmentVariables {
		p.Line("environment", render.Quote(v.Name)+"="+render.Quote(v.Value))
	}
	for _, q := range a.Platform().GetProperties() {
		p.Line("platform", render.Quote(q.Name)+"="+render.Quote(q.Value))
	}
	root := fmt.Sprintf("%s/%d", a.InputRootDigest.GetHash(), a.InputRootDigest.GetSizeBytes())
	if a.InputErr != nil {
		p.Line("inputs", fmt.Sprintf("%s  cannot be read: %v", render.Quote(root), a.InputErr))
	} else {
		p.Line("inputs", fmt.Sprintf("%s  %s, %s", root, render.Count(a.Input.Files(), "file"), sandbox.Bytes(a.Input.Bytes())))
	}
	for _, o := range a.Outputs() {
		p.Line("declares", render.Quote(o))
	}
	if a.Timeout != nil {
		p.Line("timeout", a.Timeout.AsDuration().String())
	}
	if a.DoNotCache {
		p.Line("cache", "do_not_cache: its result is not recorded")
	}
	switch {
	case a.failure != nil:
		a.failure.writeText(p)
	case a.Result == nil:
		p.Line("result", "none is recorded")
	default:
		p.Result(a.Result)
	}
	return p.Err
}

// WriteJSON prints a as one object.
func (a *Description) WriteJSON(w io.Writer) error {
	o, err := a.Object()
	if err != nil {
		return err
	}
	return render.JSON(w, o)
}

// Failure describes the failure of the run: how it ended, and the lines of its message. It returns "" if the run did not
// fail.
func (a *Description) Failure() (summary string, lines []string) {
	if a.failure == nil {
		return "", nil
	}
	return a.failure.summary(), a.failure.lines
}

// Object returns a for JSON, with the messages of the API in their JSON mapping.
func (a *Description) Object() (map[string]any, error) {
	o := map[string]any{"digest": a.Digest.String(), "instance": a.Instance}
	messages := map[string]proto.Message{"action": a.Action.Action, "command": a.Command}
	if a.failure != nil {
		messages["failure"] = a.failure.entry
		o["message"] = a.failure.lines
	}
	if a.InputErr != nil {
		o["input"] = map[string]any{"error": a.InputErr.Error()}
	} else {
		o["input"] = map[string]any{"files": a.Input.Files(), "bytes": a.Input.Bytes()}
	}
	if a.Result != nil {
		// An unknown type cannot be mapped, but must not hide the rest.
		var aux []any
		for _, m := range a.Result.ExecutionMetadata.GetAuxiliaryMetadata() {
			if b, err := protojson.Marshal(m); err == nil {
				aux = append(aux, json.RawMessage(b))
			} else {
				aux = append(aux, map[string]string{"@type": m.TypeUrl, "encoded": base64.StdEncoding.EncodeToString(m.Value)})
			}
		}
		if aux != nil {
			o["auxiliaryMetadata"] = aux
		}
		messages["result"] = withoutAuxiliary(a.Result)
	}
	for _, name := range slices.Sorted(maps.Keys(messages)) {
		b, err := protojson.Marshal(messages[name])
		if err != nil {
			return nil, exit.New(exit.No, fmt.Errorf("%s of %s: %w", name, a.Digest, err))
		}
		o[name] = json.RawMessage(b)
	}
	return o, nil
}

// withoutAuxiliary returns r without the metadata that its worker added.
func withoutAuxiliary(r *repb.ActionResult) *repb.ActionResult {
	if r.ExecutionMetadata == nil {
		return r
	}
	r = proto.CloneOf(r)
	r.ExecutionMetadata.AuxiliaryMetadata = nil
	return r
}

// Manifest returns the manifest of the run that made the result, after checking that it is canonical and has the stable
// hash of the result.
func (a *Description) Manifest(ctx context.Context, s cas.Store) (string, error) {
	if a.failure != nil && a.failure.evicted {
		return "", a.failure.errEvicted(a.Digest)
	}
	if a.Result == nil {
		return "", exit.New(exit.Absent, fmt.Errorf("action %s: no result is recorded, so there is no manifest", a.Digest))
	}
	digest, stable := worker.RecordedManifest(a.Result)
	if digest.IsZero() {
		return "", exit.New(exit.Absent, fmt.Errorf("action %s: its result names no manifest; an older or another kind of worker made it", a.Digest))
	}
	text, err := cas.ReadAll(ctx, s, digest, manifest.MaxBytes)
	if errors.Is(err, cas.ErrNotFound) {
		return "", exit.New(exit.Absent, fmt.Errorf("action %s: its manifest %s is gone; run the action again", a.Digest, digest))
	}
	if err != nil {
		return "", fmt.Errorf("manifest of action %s: %w", a.Digest, err)
	}
	m, err := manifest.Parse(text)
	if err != nil {
		return "", fmt.Errorf("manifest %s of action %s: %w", digest, a.Digest, err)
	}
	if m.StableHash() != stable || m.Action != a.Digest {
		return "", fmt.Errorf("manifest %s is of action %s with stable hash %s, but the result of action %s has stable hash %s",
			digest, m.Action, m.StableHash(), a.Digest, render.Quote(stable))
	}
	return string(text), nil
}
