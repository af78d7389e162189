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

// Failure describes the failure of the run: how it ended, and the lines of its message. It returns "" if the run did
// not fail.
func (a *Description) Failure() (summary string, lines []string) {
	if a.failure == nil {
		return "", nil
	}
	return a.failure.summary(), a.failure.lines
}

// An Object is a Description in JSON. Messages of the API are in the JSON mapping of Protocol Buffers.
type Object struct {
	Action json.RawMessage `json:"action"` // an Action
	// AuxiliaryMetadata is what the worker added to the metadata of the result.
	AuxiliaryMetadata []json.RawMessage `json:"auxiliaryMetadata,omitempty"`
	Command           json.RawMessage   `json:"command"` // a Command
	Digest            string            `json:"digest"`
	Failure           json.RawMessage   `json:"failure,omitempty"` // the cloister.v1.HistoryEntry of a failed run
	Input             ObjectInput       `json:"input"`
	Instance          string            `json:"instance"`
	Message           []string          `json:"message,omitempty"` // the lines of the message of a failed run
	Result            json.RawMessage   `json:"result,omitempty"`  // an ActionResult
}

// An ObjectInput describes an input root. It has either an Error or the other fields.
type ObjectInput struct {
	Bytes *int64 `json:"bytes,omitempty"`
	Error string `json:"error,omitempty"` // why it cannot be read
	Files *int64 `json:"files,omitempty"`
}

// Object returns a for JSON.
func (a *Description) Object() (*Object, error) {
	var failed error
	encode := func(name string, m proto.Message) json.RawMessage {
		b, err := protojson.Marshal(m)
		if err != nil && failed == nil {
			failed = exit.New(exit.No, fmt.Errorf("%s of %s: %w", name, a.Digest, err))
		}
		return b
	}
	o := &Object{
		Digest: a.Digest.String(), Instance: a.Instance,
		Action: encode("action", a.Action.Action), Command: encode("command", a.Command),
	}
	if a.failure != nil {
		o.Failure, o.Message = encode("failure", a.failure.entry), a.failure.lines
	}
	if a.InputErr != nil {
		o.Input.Error = a.InputErr.Error()
	} else {
		o.Input.Files, o.Input.Bytes = new(a.Input.Files()), new(a.Input.Bytes())
	}
	if a.Result != nil {
		// An unknown type cannot be mapped, but must not hide the rest.
		for _, m := range a.Result.ExecutionMetadata.GetAuxiliaryMetadata() {
			b, err := protojson.Marshal(m)
			if err != nil {
				b, err = json.Marshal(map[string]string{"@type": m.TypeUrl, "encoded": base64.StdEncoding.EncodeToString(m.Value)})
			}
			if err != nil {
				return nil, err
			}
			o.AuxiliaryMetadata = append(o.AuxiliaryMetadata, b)
		}
		o.Result = encode("result", withoutAuxiliary(a.Result))
	}
	return o, failed
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
