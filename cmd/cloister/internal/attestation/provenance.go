// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker/repro/attest"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// OfResult returns the provenance of the cached result of an action.
func OfResult(ctx context.Context, s *remote.Store, digest cas.Digest) (*attest.Statement, error) {
	action, err := changes.ReadAction(ctx, s, digest)
	if err != nil {
		return nil, err
	}
	r, err := s.Lookup(ctx, digest)
	if err != nil {
		return nil, err
	}
	d := descriptors{function: digest.Function()}
	p := &attest.Provenance{
		BuildDefinition: attest.BuildDefinition{
			BuildType:            attest.BuildType,
			ExternalParameters:   parameters(s.Name(), action),
			ResolvedDependencies: []attest.Descriptor{d.of("action", digest), d.proto("command", action.CommandDigest), d.proto("input root", action.InputRootDigest)},
		},
		RunDetails: attest.RunDetails{Builder: attest.Builder{ID: BuilderID}},
	}
	for name, log := range map[string]*repb.Digest{"stdout": r.StdoutDigest, "stderr": r.StderrDigest} {
		if log != nil {
			p.RunDetails.Byproducts = append(p.RunDetails.Byproducts, d.proto(name, log))
		}
	}
	slices.SortFunc(p.RunDetails.Byproducts, func(a, b attest.Descriptor) int { return strings.Compare(a.Name, b.Name) })
	if m := r.ExecutionMetadata; m != nil {
		if m.ExecutionStartTimestamp != nil && m.ExecutionCompletedTimestamp != nil {
			p.RunDetails.Metadata = attest.Metadata{StartedOn: m.ExecutionStartTimestamp.AsTime(), FinishedOn: m.ExecutionCompletedTimestamp.AsTime()}
		}
		if err := addManifest(ctx, s, m, p, &d); err != nil {
			return nil, err
		}
	}
	statement := &attest.Statement{Subjects: d.outputs(r), Provenance: p}
	if len(statement.Subjects) == 0 {
		statement.Subjects = []attest.Descriptor{d.of(digest.String(), digest)}
	}
	return statement, d.err
}

// BuilderID identifies the software of the builder. The signature identifies its operator.
const BuilderID = "https://github.com/cloister-build/cloister"

// addManifest adds the content of the manifest of the run, if it still exists.
func addManifest(ctx context.Context, s *remote.Store, meta *repb.ExecutedActionMetadata, p *attest.Provenance, d *descriptors) error {
	var ours cloisterpb.Execution
	for _, m := range meta.AuxiliaryMetadata {
		if m.MessageIs(&ours) {
			if err := m.UnmarshalTo(&ours); err != nil {
				return fmt.Errorf("metadata of the result: %w", err)
			}
		}
	}
	if ours.Manifest == "" {
		return nil
	}
	digest, err := cas.ParseDigest(ours.Manifest)
	if err != nil {
		return fmt.Errorf("metadata of the result: manifest: %w", err)
	}
	text, err := cas.ReadAll(ctx, s, digest, manifest.MaxBytes)
	if errors.Is(err, cas.ErrNotFound) {
		return nil // it is not part of the result, and may be evicted earlier
	}
	if err != nil {
		return err
	}
	m, err := manifest.Parse(text)
	if err != nil {
		return fmt.Errorf("manifest %s: %w", digest, err)
	}
	p.RunDetails.Byproducts = append(p.RunDetails.Byproducts, d.of("manifest", digest))
	p.BuildDefinition.InternalParameters = map[string]string{
		"stableHash":        m.StableHash(),
		"specHash":          ours.SpecHash,
		"configurationHash": m.Configuration.Hash(),
		"toolchainHash":     m.Toolchain.Hash(),
		"profile":           m.Configuration.Profile,
		"worker":            m.Volatile.Worker,
		"tier":              m.Volatile.Tier,
		"system":            strings.TrimSpace(m.Toolchain.OS + " " + m.Toolchain.Version + " " + m.Toolchain.Kernel + " " + m.Toolchain.Release + " " + m.Toolchain.Architecture),
	}
	if m.Seed != nil {
		p.BuildDefinition.InternalParameters["seed"] = fmt.Sprint(*m.Seed)
	}
	for _, program := range m.Toolchain.Programs {
		if program.Sum != manifest.Unreadable {
			p.BuildDefinition.ResolvedDependencies = append(p.BuildDefinition.ResolvedDependencies,
				attest.Descriptor{Name: program.Path, Digest: map[string]string{"sha256": program.Sum}})
		}
	}
	if m.Revision != "" {
		p.BuildDefinition.ResolvedDependencies = append(p.BuildDefinition.ResolvedDependencies,
			attest.Descriptor{Name: "source revision", Digest: map[string]string{"gitCommit": m.Revision}})
	}
	return nil
}

// parameters returns what the action states.
func parameters(instance string, a *changes.Action) attest.Parameters {
	p := attest.Parameters{
		Action:           a.Digest.String(),
		Instance:         instance,
		Arguments:        a.Command.Arguments,
		WorkingDirectory: a.Command.WorkingDirectory,
		OutputPaths:      a.Outputs(),
	}
	for _, v := range a.Command.EnvironmentVariables {
		p.Environment = append(p.Environment, v.Name+"="+v.Value)
	}
	for _, v := range a.Platform().GetProperties() {
		p.Platform = append(p.Platform, v.Name+"="+v.Value)
	}
	return p
}

// descriptors makes Descriptors of digests of one function; err is the first error.
type descriptors struct {
	function cas.Function
	err      error
}

func (ds *descriptors) of(name string, d cas.Digest) attest.Descriptor {
	return attest.Descriptor{Name: name, Digest: map[string]string{strings.ToLower(d.Function().String()): d.Hash()}}
}

func (ds *descriptors) proto(name string, p *repb.Digest) attest.Descriptor {
	d, err := cas.FromProto(ds.function, p)
	if err != nil {
		if ds.err == nil {
			ds.err = fmt.Errorf("%s: %w", name, err)
		}
		return attest.Descriptor{}
	}
	return ds.of(name, d)
}

// Media types of directories, by the message that the digest names, and of links.
const (
	mediaTree      = "application/x-protobuf; messageType=build.bazel.remote.execution.v2.Tree"
	mediaDirectory = "application/x-protobuf; messageType=build.bazel.remote.execution.v2.Directory"
	MediaLink      = "inode/symlink"
)

// outputs returns the files, directories and links of a result, by name. The digest of a link is that of its target.
func (ds *descriptors) outputs(r *repb.ActionResult) []attest.Descriptor {
	all := []attest.Descriptor{} // not nil, for an empty JSON list
	for _, f := range r.OutputFiles {
		d := ds.proto(f.Path, f.Digest)
		if f.IsExecutable {
			d.Annotations = map[string]string{"executable": "true"}
		}
		all = append(all, d)
	}
	for _, dir := range r.OutputDirectories {
		d, media := dir.TreeDigest, mediaTree
		if d == nil {
			d, media = dir.RootDirectoryDigest, mediaDirectory
		}
		desc := ds.proto(dir.Path, d)
		desc.MediaType = media
		all = append(all, desc)
	}
	for _, l := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		desc := ds.of(l.Path, ds.function.Sum([]byte(l.Target)))
		desc.MediaType, desc.Annotations = MediaLink, map[string]string{"target": l.Target}
		all = append(all, desc)
	}
	slices.SortFunc(all, func(a, b attest.Descriptor) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b attest.Descriptor) bool { return a.Name == b.Name && a.MediaType == b.MediaType })
}

// log returns the descriptor of stdout or stderr, empty without output, for which some servers name the empty blob.
func (ds *descriptors) log(named *repb.Digest, inline []byte) attest.Descriptor {
	switch {
	case named.GetSizeBytes() > 0:
		return ds.proto("", named)
	case len(inline) > 0:
		return ds.of("", ds.function.Sum(inline))
	}
	return attest.Descriptor{}
}
