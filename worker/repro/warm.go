// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// factorWorker is the factor of what differs between a request to a persistent worker and runs in processes of their
// own. It cannot be chosen: Cloister starts a process for each run that it varies, so only Options.First and the runs
// of other servers can be such requests.
const factorWorker Factor = "persistent-worker"

// causeWorker is the one of compare.Causes that no output shows.
const causeWorker compare.Cause = "persistent worker"

var workerFactor = factor{name: factorWorker, cause: causeWorker}

// describeWorker adds the number of the request to a persistent worker to what a run varied. It reports whether the run
// was such a request.
func (c *check) describeWorker(ctx context.Context, r *Run) bool {
	d, err := cas.ParseDigest(r.Manifest)
	if err != nil {
		return false
	}
	text, err := cas.ReadAll(ctx, r.executor.Store, d, manifest.MaxBytes)
	if err != nil {
		return false
	}
	m, err := manifest.Parse(text)
	if err != nil || m.Volatile.WorkerRequest == 0 {
		return false
	}
	r.Varied = append(r.Varied, fmt.Sprintf("%s request %d", factorWorker, m.Volatile.WorkerRequest))
	return true
}

// findWarm finds what differs because the first run was a request to a persistent worker: two runs in processes of
// their own, without variation, agree with each other and with the varied runs in it, but not with the first run.
func (c *check) findWarm(ctx context.Context) error {
	first := &c.verdict.Runs[0]
	if first.executor.Features == nil { // it does not heed variations, which would give a run its own process
		return nil
	}
	b := &Bisection{
		Held: []Factor{factorWorker}, noise: noise{}, values: map[place]*values{}, compared: map[pair][]string{},
	}
	for len(b.controls) < 2 {
		if len(b.controls) == 1 {
			if err := c.pause(ctx, b.controls[0].Start); err != nil { // times must not look constant
				return err
			}
		}
		r, err := c.execute(ctx, first.executor, c.planner.baseline(), 0, fmt.Sprintf("control %d of 2, without a persistent worker", len(b.controls)+1))
		if err != nil {
			return err
		}
		b.controls = append(b.controls, r)
	}
	b.Runs, b.control = len(b.controls), *b.controls[0]
	cold := []*Run{b.controls[1]}
	for i := range c.verdict.Runs[1:] {
		cold = append(cold, &c.verdict.Runs[1+i])
	}
	for _, r := range cold {
		for _, name := range differing(&b.control, r) {
			for _, l := range b.noise.unknown(ctx, name, &b.control, r) {
				b.noise.add(name, l.key, explanation{cause: l.cause})
			}
		}
	}
	if changed := b.noise.beyond(ctx, &b.control, first); len(changed) > 0 {
		b.Steps = []Step{{Factor: factorWorker, Runs: 1, Changed: displayNames(changed), runs: []*Run{first}}}
		c.verdict.Bisection = b
		b.found(&c.verdict, factorWorker, b.Steps[0].Changed)
		b.summarize(c.Runs)
	}
	return nil
}
