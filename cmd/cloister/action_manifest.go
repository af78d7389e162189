// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// manifest returns the text that records the run which made the result. It is what the result says it is: canonical, and
// of the stable hash that the result names.
func (a *description) manifest(ctx context.Context, s cas.Store) (string, error) {
	if a.result == nil {
		return "", newExit(exitAbsent, fmt.Errorf("action %s: no result is recorded, and so no manifest is known", a.digest))
	}
	digest, stable := worker.RecordedManifest(a.result)
	if digest.IsZero() {
		return "", newExit(exitAbsent, fmt.Errorf("action %s: its result names no manifest: another kind of worker made it, or an older one", a.digest))
	}
	text, err := cas.ReadAll(ctx, s, digest, manifest.MaxBytes)
	if errors.Is(err, cas.ErrNotFound) {
		return "", newExit(exitAbsent, fmt.Errorf("action %s: its manifest %s is not kept any more; run the action again", a.digest, digest))
	}
	if err != nil {
		return "", fmt.Errorf("manifest of action %s: %w", a.digest, err)
	}
	m, err := manifest.Parse(text)
	if err != nil {
		return "", fmt.Errorf("manifest %s of action %s: %w", digest, a.digest, err)
	}
	if m.StableHash() != stable || m.Action != a.digest {
		return "", fmt.Errorf("manifest %s is of action %s with the stable hash %s, the result of action %s names the stable hash %s",
			digest, m.Action, m.StableHash(), a.digest, quote(stable))
	}
	return string(text), nil
}
