// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// record writes the manifest, and puts it into the store together with all that was collected. One that nobody could read
// again is not kept, and has its stable hash all the same.
func (l *Local) record(ctx context.Context, c *execution, out *Outcome) error {
	m, err := l.manifest(c, out)
	if err != nil {
		return err
	}
	var text string
	if text, out.StableHash = m.Sealed(); len(text) <= manifest.MaxBytes {
		if out.Manifest, err = c.collected.batch.AddBytes(ctx, c.req.Digest.Function(), []byte(text)); err != nil {
			return err
		}
	}
	err = c.collected.batch.Flush(ctx)
	c.collected.ended = time.Now()
	return err
}

// manifest returns the record of a run with the result that out has.
func (l *Local) manifest(c *execution, out *Outcome) (*manifest.Manifest, error) {
	t, g := c.task, c.box.grant
	toolchain, accidental := l.toolchain(c.box.spec, c.ran.Result)
	m := &manifest.Manifest{
		Action:        c.req.Digest,
		Revision:      t.Revision,
		Seed:          t.Seed,
		Spec:          c.spec,
		Configuration: manifest.Configuration{Profile: g.Profile, Hermetic: g.Hermetic, LogBytes: l.LogBytes},
		Toolchain:     toolchain,
		Status:        out.Status.String(),
		ExitCode:      c.ran.ExitCode,
		Volatile: manifest.Volatile{
			Worker: l.Name, Backend: l.Features.Backend, Tier: l.Features.Tier, Audit: cmp.Or(string(c.box.spec.Audit), "attempts"), Policy: l.policyHash, Rule: g.Rule,
			Queued: t.Queued, Began: c.began, Staging: c.staged.began, Staged: c.staged.ended, Started: c.ran.Start, Ended: c.ran.End,
			Programs: accidental, Usage: c.ran.Usage, Events: len(c.collected.Events), Unrecorded: c.collected.Unrecorded,
		},
	}
	if t.Variation != nil {
		m.Order = t.Variation.Order
	}
	for _, limit := range sandbox.AllLimits {
		if c.box.spec.Limits.Of(limit) != g.Stated.Of(limit) {
			m.Volatile.Unenforced = append(m.Volatile.Unenforced, limit)
		}
	}
	var err error
	if m.Command, m.InputRoot, err = parts(c.req.Digest, c.req.Action); err != nil {
		return nil, err
	}
	d := digests{of: c.req.Digest.Function()}
	m.Stdout, m.Stderr = d.digest(out.Result.StdoutDigest), d.digest(out.Result.StderrDigest)
	m.Outputs = d.outputs(out.Result)
	return m, d.err
}

// permitted returns the canonical text of what the policy let the action see and use, whatever of it this worker could
// enforce, however closely it watched and however little time there was for it, and the hash of what held here. Of its
// input root that is the whole; which parts of it were mounts of their own is this worker's affair.
func (l *Local) permitted(c *execution) (granted, hash string) {
	spec, root := *c.box.spec, c.req.Action.GetInputRootDigest()
	whole := sandbox.Input{Target: c.box.root, Content: fmt.Sprintf("%s/%d", root.GetHash(), root.GetSizeBytes())}
	spec.Inputs = append(slices.Clone(l.Toolchain), whole)
	other := spec
	other.Limits, other.Audit, other.Timeout = c.box.grant.Stated, sandbox.AuditViolations, c.box.timeout
	granted = other.Text()
	if spec.Limits == other.Limits && spec.Audit == other.Audit && spec.Timeout == other.Timeout {
		return granted, manifest.Hash(granted) // as is usual, and sooner done
	}
	return granted, spec.Hash()
}

// digests reads digests of one function from messages, up to the first that is none.
type digests struct {
	of  cas.Function
	err error
}

func (d *digests) digest(p *repb.Digest) cas.Digest {
	if p == nil {
		return cas.Digest{}
	}
	digest, err := cas.FromProto(d.of, p)
	d.err = cmp.Or(d.err, err)
	return digest
}

// outputs returns what a result has, each once: to clients of different versions it says some of it twice.
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
			all = append(all, manifest.Output{Kind: manifest.Root, Path: dir.Path, Digest: d.digest(dir.RootDirectoryDigest)})
		}
	}
	for _, links := range [][]*repb.OutputSymlink{r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks} {
		for _, link := range links {
			all = append(all, manifest.Output{Kind: manifest.Symlink, Path: link.Path, Target: link.Target})
		}
	}
	return all
}

// RecordedManifest returns what a result says of the manifest of its run, the digest of the text and its stable hash, zero if it
// says nothing that can be read.
func RecordedManifest(r *repb.ActionResult) (text cas.Digest, stableHash string) {
	for _, aux := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		var e cloisterpb.Execution
		if !aux.MessageIs(&e) || aux.UnmarshalTo(&e) != nil {
			continue
		}
		if d, err := cas.ParseDigest(e.Manifest); err == nil {
			text = d
		}
		stableHash = printable(e.StableHash, maxField)
	}
	return text, stableHash
}
