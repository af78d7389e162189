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

var workerFactor = factor{name: factorWorker, cause: compare.PersistentWorker}

// describeWorkers adds the number of the request to a persistent worker to what a run varied, for the runs that can be
// such requests. It reports whether the first run was one.
func (c *check) describeWorkers(ctx context.Context) (first bool) {
	for i := range c.verdict.Runs {
		r := &c.verdict.Runs[i]
		if r.executor.Features != nil && (i > 0 || c.First == nil) { // a process was started for it
			continue
		}
		if n := c.workerRequest(ctx, r); n > 0 {
			r.Varied = append(r.Varied, fmt.Sprintf("%s request %d", factorWorker, n))
			first = first || i == 0
		}
	}
	return first
}

// workerRequest returns the number of the request to a persistent worker that a run was, or 0.
func (c *check) workerRequest(ctx context.Context, r *Run) int {
	d, err := cas.ParseDigest(r.Manifest)
	if err != nil {
		return 0
	}
	text, err := cas.ReadAll(ctx, r.executor.Store, d, manifest.MaxBytes)
	if err != nil {
		return 0
	}
	m, err := manifest.Parse(text)
	if err != nil {
		return 0
	}
	return m.Volatile.WorkerRequest
}

// findWarm finds what differs because the first run was a request to a persistent worker: two runs in processes of
// their own, without variation, agree with each other and with the varied runs in it, but not with the first run.
func (c *check) findWarm(ctx context.Context) error {
	first := &c.verdict.Runs[0]
	if first.executor.Features == nil { // it does not heed variations, which would give a run its own process
		return c.findRaces(ctx)
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
	changed := b.noise.beyond(ctx, &b.control, first)
	if len(changed) == 0 { // the worker is not responsible
		return c.findRaces(ctx)
	}
	b.Steps = []Step{{Factor: factorWorker, Runs: 1, Changed: displayNames(changed), runs: []*Run{first}}}
	c.verdict.Bisection = b
	b.found(&c.verdict, factorWorker, b.Steps[0].Changed)
	b.summarize(c.Runs)
	return nil
}
