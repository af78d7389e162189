// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"fmt"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// record puts the manifest and the collected blobs into the store. A manifest that is too large to be read again is not
// stored, but its stable hash is still recorded.
func (l *Local) record(ctx context.Context, e *execution, out *Outcome) error {
	m, err := l.manifest(e, out)
	if err != nil {
		return err
	}
	batch := e.collected.batch
	var text string
	if text, out.StableHash = m.Sealed(); len(text) <= manifest.MaxBytes {
		if out.Manifest, err = batch.AddBytes(ctx, e.req.Digest.Function(), []byte(text)); err != nil {
			return err
		}
	}
	err = batch.Flush(ctx)
	e.collected.ended = time.Now()
	return err
}

// manifest returns the manifest of a run.
func (l *Local) manifest(e *execution, out *Outcome) (*manifest.Manifest, error) {
	t, g, spec := e.task, e.box.grant, e.box.spec
	toolchain, accidental := l.toolchain(spec, e.ran.Result)
	m := &manifest.Manifest{
		Action:        e.req.Digest,
		Revision:      t.Revision,
		Seed:          t.Seed,
		Spec:          e.spec,
		Configuration: manifest.Configuration{Profile: g.Profile, Hermetic: g.Hermetic, LogBytes: l.cfg.LogBytes},
		Toolchain:     toolchain,
		RemoteAPIs:    e.ran.remote,
		Status:        out.Status.String(),
		ExitCode:      e.ran.ExitCode,
		Volatile: manifest.Volatile{
			Worker: l.cfg.Name, Backend: l.cfg.Features.Backend, Tier: l.cfg.Features.Tier,
			Audit: spec.Audit.String(), Fingerprint: e.box.toolchain, Policy: l.policyHash, Rule: g.Rule,
			Queued: t.Queued, Began: e.began, Staging: e.staged.began, Staged: e.staged.ended,
			Started: e.ran.Start, Ended: e.ran.End, Programs: accidental, Usage: e.ran.Usage,
			Events: len(e.collected.Events), Unrecorded: e.collected.Unrecorded,
		},
	}
	if f := &l.cfg.Features; f.Kernel != "" || len(f.Gaps) > 0 {
		m.Sandbox = f.Backend
	}
	if t.Variation != nil {
		m.Order = t.Variation.Order
	}
	if r := e.staged.request; r != nil {
		m.Volatile.WorkerRequest = r.worker.served
	}
	for _, limit := range sandbox.AllLimits {
		if spec.Limits.Of(limit) != g.Stated.Of(limit) {
			m.Volatile.Unenforced = append(m.Volatile.Unenforced, limit)
		}
	}
	var err error
	if m.Command, m.InputRoot, err = parts(e.req.Digest, e.req.Action); err != nil {
		return nil, err
	}
	d := digests{function: e.req.Digest.Function()}
	m.Stdout, m.Stderr = d.digest(out.Result.StdoutDigest), d.digest(out.Result.StderrDigest)
	m.Outputs = d.outputs(out.Result)
	return m, d.err
}

// grantedSpec returns the canonical text of what the policy let the action see and use, and the hash of what applied
// here. The text does not depend on which limits this worker can enforce, how closely it audits, and when it kills the
// run. The input root counts as a whole: which of its parts are separate mounts depends on the worker.
func (l *Local) grantedSpec(e *execution) (granted, hash string) {
	spec, root := *e.box.spec, e.req.Action.GetInputRootDigest()
	whole := sandbox.Input{Target: e.box.root, Content: fmt.Sprintf("%s/%d", root.GetHash(), root.GetSizeBytes())}
	spec.Inputs, spec.Lower = append(l.hostInputs(e.box.grant, &e.req.place), whole), nil
	if root := e.req.root; root.own() {
		spec.Root = &sandbox.Root{Content: root.digest.String()} // also if it is merged with the input root
	}
	stated := spec
	stated.Limits, stated.Audit, stated.Timeout, stated.Kill = e.box.grant.Stated, sandbox.AuditViolations, e.box.timeout, nil
	granted = stated.Text()
	if spec.Limits == stated.Limits && spec.Audit == stated.Audit && len(spec.Kill) == 0 && spec.Timeout == stated.Timeout {
		return granted, manifest.Hash(granted) // the common case, and faster
	}
	return granted, spec.Hash()
}

// digests converts digests from messages and keeps the first error.
type digests struct {
	function cas.Function
	err      error
}

func (d *digests) digest(p *repb.Digest) cas.Digest {
	if p == nil {
		return cas.Digest{}
	}
	digest, err := cas.FromProto(d.function, p)
	d.err = cmp.Or(d.err, err)
	return digest
}

// outputs returns the outputs of a result. Results repeat some of them for older clients; manifests do not.
func (d *digests) outputs(r *repb.ActionResult) []manifest.Output {
	var all []manifest.Output
	for _, f := range r.OutputFiles {
		kind := manifest.File
		if f.IsExecutable {
			kind = manifest.Executable
		}
		all = append(all, manifest.Output{Kind: kind, Path: f.Path, Digest: d.digest(f.Digest)})
	}
	for _, dir := range r.OutputDirectories {
		if dir.TreeDigest != nil {
			all = append(all, manifest.Output{Kind: manifest.Tree, Path: dir.Path, Digest: d.digest(dir.TreeDigest)})
		}
		if dir.RootDirectoryDigest != nil {
			root := d.digest(dir.RootDirectoryDigest)
			all = append(all, manifest.Output{Kind: manifest.Root, Path: dir.Path, Digest: root})
		}
	}
	for _, links := range [][]*repb.OutputSymlink{r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks} {
		for _, link := range links {
			all = append(all, manifest.Output{Kind: manifest.Symlink, Path: link.Path, Target: link.Target})
		}
	}
	return all
}

// RecordedManifest returns the digest and the stable hash of the manifest that a result's metadata names, or zero
// values.
func RecordedManifest(r *repb.ActionResult) (text cas.Digest, stableHash string) {
	e := results.Recorded(r)
	if d, err := cas.ParseDigest(e.GetManifest()); err == nil {
		text = d
	}
	return text, printable.Head(e.GetStableHash(), maxField)
}
