// SPDX-License-Identifier: Apache-2.0

package history

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

const (
	// blobOverhead is charged for each protected blob in addition to its size, so that the number of blobs is bounded.
	blobOverhead = 512
	// putTimeout limits the time for storing a response, for which a client waits.
	putTimeout = 10 * time.Second
)

// FailuresConfig configures Failures. Log and Instances are required.
type FailuresConfig struct {
	// Log has the entries that name the responses. It must stay open until Close.
	Log       *Log
	Instances cas.Instances
	// MaxBytes limits the size of the blobs that are protected from eviction, with 512 bytes more for each; 0 protects
	// none.
	MaxBytes int64
	// RenewInterval must be well below the lease of the store; the default is an hour.
	RenewInterval time.Duration
}

// Failures stores the responses of failed actions, and renews the leases of what they refer to: the action and its
// command, stdout, stderr, the audit log, the manifest, and the outputs if they fit. Of each action it protects the
// newest failure, and of all actions the newest failures up to FailuresConfig.MaxBytes; older ones are evicted like
// other blobs. Its methods are safe for concurrent use.
type Failures struct {
	cfg   FailuresConfig
	stop  context.CancelFunc
	ended chan struct{} // closed when the renewals have ended
}

// KeepFailures returns Failures, which the caller closes. It begins at once to renew the leases of failures that the
// log already has.
func KeepFailures(c FailuresConfig) *Failures {
	if c.RenewInterval <= 0 {
		c.RenewInterval = time.Hour
	}
	ctx, stop := context.WithCancel(context.Background())
	f := &Failures{cfg: c, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(f.ended)
		tick := time.NewTicker(c.RenewInterval)
		defer tick.Stop()
		for {
			f.Renew(ctx)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return f
}

// Close ends the renewals.
func (f *Failures) Close() {
	f.stop()
	<-f.ended
}

// Put stores the response of a failed action and returns its digest, for Entry.Response. It logs errors and returns the
// zero Digest, because the client gets the response anyway.
func (f *Failures) Put(instance string, action cas.Digest, r *repb.ExecuteResponse) cas.Digest {
	ctx, cancel := context.WithTimeout(context.Background(), putTimeout)
	defer cancel()
	in, err := f.cfg.Instances(instance)
	if err == nil {
		var d cas.Digest
		if d, err = cas.PutProto(ctx, in.Store, action.Function(), r); err == nil {
			return d
		}
	}
	f.cfg.Log.cfg.Log.Warn("cannot store the result of a failed action", "action", action.String(), "instance", instance, "err", err)
	return cas.Digest{}
}

// Renew renews the leases of the newest failures, once. Failures whose blobs are absent are skipped.
func (f *Failures) Renew(ctx context.Context) {
	r := renewal{ctx: ctx, instances: f.cfg.Instances, left: f.cfg.MaxBytes, charged: map[leased]bool{}}
	err := f.cfg.Log.Search(ctx, Filter{Instances: func(string) bool { return true }, kept: true, Failed: true, Distinct: true}, maxDistinct, r.renew)
	if err = cmp.Or(err, r.err); err != nil && ctx.Err() == nil {
		f.cfg.Log.cfg.Log.Warn("cannot renew the leases of failed actions", "err", err)
	}
}

// A leased is a blob of an instance.
type leased struct {
	instance string
	blob     cas.Digest
}

// A renewal is the state of Renew.
type renewal struct {
	ctx       context.Context
	instances cas.Instances
	left      int64 // of FailuresConfig.MaxBytes
	charged   map[leased]bool
	err       error // the first error other than an absent blob
}

// renew renews the leases of a failure, unless they exceed what is left. It ends the search when nothing is left.
func (r *renewal) renew(e *Entry) error {
	if r.left < blobOverhead {
		return errStop
	}
	if err := r.entry(e); err != nil && !errors.Is(err, cas.ErrNotFound) && r.err == nil {
		r.err = fmt.Errorf("action %s: %w", e.Action, err)
	}
	return r.ctx.Err()
}

func (r *renewal) entry(e *Entry) error {
	in, err := r.instances(e.Instance)
	if err != nil {
		return err
	}
	action, err := cas.ParseDigest(e.Action)
	if err != nil {
		return err
	}
	response, err := cas.ParseDigest(e.Response)
	if err != nil {
		return err
	}
	// Reading a blob renews its lease, so read only what fits.
	blobs := []cas.Digest{response, action}
	if !r.fits(in, blobs) {
		return nil
	}
	message, what := &repb.ExecuteResponse{}, &repb.Action{}
	if err := cas.ReadProto(r.ctx, in.Store, response, message); err != nil {
		return err
	}
	if err := cas.ReadProto(r.ctx, in.Store, action, what); err != nil {
		return err
	}
	parts := []*repb.Digest{what.CommandDigest, message.Result.GetStdoutDigest(), message.Result.GetStderrDigest()}
	for _, log := range message.ServerLogs {
		parts = append(parts, log.GetDigest())
	}
	for _, p := range parts {
		if d, err := cas.FromProto(action.Function(), p); err == nil {
			blobs = append(blobs, d)
		}
	}
	if manifest, err := cas.ParseDigest(e.Manifest); err == nil {
		blobs = append(blobs, manifest)
	}
	if !r.fits(in, blobs) {
		return nil
	}
	if _, err := in.Store.Missing(r.ctx, blobs); err != nil {
		return err
	}
	r.charge(in, blobs)
	if message.Result == nil {
		return nil
	}
	outputs, err := cas.Closure(r.ctx, in.Store, action.Function(), message.Result)
	if err != nil || !r.fits(in, outputs) {
		return err
	}
	_, err = in.Store.Missing(r.ctx, outputs)
	r.charge(in, outputs)
	return err
}

// cost returns the charge for those blobs that were not charged yet.
func (r *renewal) cost(in *cas.Instance, blobs []cas.Digest) (bytes int64) {
	for _, d := range blobs {
		if !r.charged[leased{in.Name, d}] {
			bytes += d.Size() + blobOverhead
		}
	}
	return bytes
}

func (r *renewal) fits(in *cas.Instance, blobs []cas.Digest) bool { return r.cost(in, blobs) <= r.left }

func (r *renewal) charge(in *cas.Instance, blobs []cas.Digest) {
	for _, d := range blobs {
		r.left -= r.cost(in, []cas.Digest{d})
		r.charged[leased{in.Name, d}] = true
	}
}
