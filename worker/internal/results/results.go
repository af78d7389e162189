// SPDX-License-Identifier: Apache-2.0

// Package results reads Cloister's metadata in action results, and hides results from lookups in action caches.
package results

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/policy"
)

// ImageProperty is the platform property that names a container image, and NoImage its value for none.
const (
	ImageProperty = "container-image"
	NoImage       = "none"
)

// A Refusal returns why a cached result of an instance must not be served, or "". It is called concurrently, with the
// context of the lookup.
type Refusal = func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) string

// Filter returns next with action caches that hide the results for which refuse returns a reason: Lookup returns
// cas.ErrNotFound for them.
func Filter(next cas.Instances, refuse Refusal) cas.Instances {
	return func(name string) (*cas.Instance, error) {
		in, err := next(name)
		if err != nil || in == nil || in.Actions == nil { // callers check that
			return in, err
		}
		filtered := *in
		filtered.Actions = filter{in.Actions, name, refuse}
		return &filtered, nil
	}
}

// filter is the action cache of an instance that Filter returns.
type filter struct {
	cas.ActionCache
	instance string
	refuse   Refusal
}

// Lookup implements cas.ActionCache.
func (f filter) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	r, err := f.ActionCache.Lookup(ctx, action)
	if err != nil {
		return nil, err
	}
	if why := f.refuse(ctx, f.instance, action, r); why != "" {
		return nil, fmt.Errorf("result of action %s is withheld: %s: %w", action, why, cas.ErrNotFound)
	}
	return r, nil
}

// OtherToolchain returns a function for Filter that refuses results of a run with another toolchain than the one that
// fingerprint returns; "" means unknown and differs from all. A result without a toolchain is served: its action saw
// none, or another program recorded it.
func OtherToolchain(fingerprint func() string) Refusal {
	return func(_ context.Context, _ string, _ cas.Digest, r *repb.ActionResult) string {
		if made := Recorded(r).GetToolchain(); made != "" {
			switch now := fingerprint(); now {
			case made:
			case "":
				return fmt.Sprintf("it was made with the toolchain %+.80q, and the toolchain of this machine is not known", made)
			default:
				return fmt.Sprintf("it was made with the toolchain %+.80q instead of %+.80q", made, now)
			}
		}
		return ""
	}
}

// IgnoredImage is a Refusal of results of actions whose image was ignored. Servers that ignore images do not use it.
func IgnoredImage(_ context.Context, _ string, _ cas.Digest, r *repb.ActionResult) string {
	if slices.ContainsFunc(Recorded(r).GetIgnoredProperties(), namesImage) {
		return "it was made without the image that the action names"
	}
	return ""
}

// OtherImage returns a function for Filter, on a server that runs images. It refuses results whose root file system the
// action's digest does not determine: that of an unpinned image, unless the operator permits it; that of an image for
// another architecture, since the digest may be that of an index; and that of this machine if the instance's default
// properties name an image.
func OtherImage(permitted bool, byDefault func(instance string) bool) Refusal {
	return func(_ context.Context, instance string, _ cas.Digest, r *repb.ActionResult) string {
		switch e := Recorded(r); {
		case e.GetUnpinned() && !permitted:
			return "its image is not pinned"
		case e.GetImageArchitecture() != "" && e.GetImageArchitecture() != runtime.GOARCH:
			return fmt.Sprintf("its image is for the architecture %+.80q, not %s", e.GetImageArchitecture(), runtime.GOARCH)
		case e.GetToolchain() != "" && e.GetImage() == "" && byDefault(instance):
			return "it was made with the toolchain of this machine, and the default properties name an image"
		}
		return ""
	}
}

// MovedImage returns a function for Filter that refuses results of an unpinned image if the action would now run in
// another one: its tag moved, or the default properties of p changed. pin resolves the value of an instance's image
// property to a reference with a digest. If pin fails with a temporary error (its method Temporary returns true), such
// results are served. After any other error they are refused, since the action no longer gets the image. next provides
// the actions.
func MovedImage(next cas.Instances, p *policy.Policy, pin func(ctx context.Context, instance, value string) (string, error)) Refusal {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) string {
		made := Recorded(r)
		if !made.GetUnpinned() {
			return ""
		}
		in, err := next(instance)
		ask := policy.Request{Instance: instance}
		if err == nil {
			ask.Properties, err = readProperties(ctx, in, action)
		}
		if err != nil {
			return fmt.Sprintf("the image that the action names is unknown: %v", err)
		}
		now := NoImage
		for _, q := range p.Properties(ask) {
			if strings.EqualFold(q.Name, ImageProperty) && q.Value != "" {
				now = q.Value
			}
		}
		if !strings.EqualFold(now, NoImage) {
			now, err = pin(ctx, instance, now)
			var late interface{ Temporary() bool } // optional interface of the errors of worker.Images
			switch {
			case errors.As(err, &late) && late.Temporary():
				return ""
			case err != nil:
				return fmt.Sprintf("it was made in the image %+.300q, which the action no longer gets: %v", made.Image, err)
			}
		}
		if now != made.Image {
			return fmt.Sprintf("it was made in the image %+.300q instead of %+.300q", made.Image, now)
		}
		return ""
	}
}

// namesImage reports whether a property NAME=VALUE, which may be quoted, names a container image. Clients spell the
// name in different cases.
func namesImage(property string) bool {
	name, _, _ := strings.Cut(strings.TrimPrefix(property, `"`), "=")
	return strings.EqualFold(name, ImageProperty)
}

// Recorded returns Cloister's metadata of a result, or nil.
func Recorded(r *repb.ActionResult) *cloisterpb.Execution {
	for _, a := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		if e := new(cloisterpb.Execution); a.MessageIs(e) && a.UnmarshalTo(e) == nil {
			return e
		}
	}
	return nil
}
