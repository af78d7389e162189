// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"fmt"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// CheckOutputs returns ErrInvalid for a result with an output path that leads out of the working directory (rule 66), a
// symlink without target or a directory without digest, and for nil. Closure checks the digests.
func CheckOutputs(r *repb.ActionResult) error {
	if err := checkResult(r); err != nil {
		return err
	}
	for _, f := range r.OutputFiles {
		if err := checkOutput(f.Path); err != nil {
			return err
		}
	}
	for _, l := range slices.Concat(r.OutputSymlinks, r.OutputFileSymlinks, r.OutputDirectorySymlinks) {
		if err := checkOutput(l.Path); err != nil {
			return err
		}
		if l.Target == "" {
			return fmt.Errorf("%w: symlink %+.80q has no target", ErrInvalid, l.Path)
		}
	}
	for _, d := range r.OutputDirectories {
		if d.Path != "" { // else the working directory itself
			if err := checkOutput(d.Path); err != nil {
				return err
			}
		}
		if d.TreeDigest == nil && d.RootDirectoryDigest == nil {
			return fmt.Errorf("%w: output directory %+.80q has no digest", ErrInvalid, d.Path)
		}
	}
	return nil
}

// CheckRecord returns ErrInvalid if action is the zero Digest or r is nil, which no ActionCache accepts.
func CheckRecord(action Digest, r *repb.ActionResult) error {
	if err := CheckDigests(action); err != nil {
		return err
	}
	return checkResult(r)
}

// checkResult returns ErrInvalid for nil.
func checkResult(r *repb.ActionResult) error {
	if r == nil {
		return invalidf("the ActionResult is missing")
	}
	return nil
}

// checkOutput returns ErrInvalid unless path is relative and without "." and "..".
func checkOutput(path string) error {
	for seg := range strings.SplitSeq(path, "/") {
		if seg == "" || seg == "." || seg == ".." || strings.ContainsRune(seg, 0) {
			return fmt.Errorf("%w: output path %+.80q is not a plain relative path", ErrInvalid, path)
		}
	}
	return nil
}

// CheckInlined returns ErrMismatch for a result with inlined contents that do not match the digest next to them, and
// ErrInvalid for output files with contents but no digest, and for nil.
func CheckInlined(f Function, r *repb.ActionResult) error {
	if err := checkResult(r); err != nil {
		return err
	}
	check := func(data []byte, p *repb.Digest) error {
		if len(data) == 0 {
			return nil
		}
		stated, err := FromProto(f, p)
		if err != nil {
			return err
		}
		if d := f.Sum(data); d != stated {
			return Mismatch(stated, d)
		}
		return nil
	}
	for _, o := range r.OutputFiles {
		if err := check(o.Contents, o.Digest); err != nil {
			return fmt.Errorf("output file %+.80q: %w", o.Path, err)
		}
	}
	// Stdout and stderr may be inlined without a digest.
	if r.StdoutDigest != nil {
		if err := check(r.StdoutRaw, r.StdoutDigest); err != nil {
			return fmt.Errorf("stdout: %w", err)
		}
	}
	if r.StderrDigest != nil {
		if err := check(r.StderrRaw, r.StderrDigest); err != nil {
			return fmt.Errorf("stderr: %w", err)
		}
	}
	return nil
}
