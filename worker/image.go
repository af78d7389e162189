// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/internal/results"
)

// Images turns the container images that actions name into root file systems. Implementations can use package image and
// must be safe for concurrent use. Errors of the instance's store, such as cas.ErrUnavailable and cas.ErrFull, keep
// their meaning, and so does cas.ErrInvalid. Any other error, including cas.ErrNotFound, means that the action cannot
// run until the action, the operator's permissions or the registry change. An error of Pin may have a method
// Temporary() bool. If it returns true, cached results of the action are still served.
type Images interface {
	// Pin returns the reference, with its digest, of the image that a property value names in an instance, such as
	// "docker://REGISTRY/REPOSITORY:TAG". It fails if the operator does not permit the image, and pulls nothing.
	Pin(ctx context.Context, instance, value string) (string, error)
	// Root returns the Directory of a pinned image in the instance's store, and the environment of its configuration, as
	// "KEY=VALUE". It pulls the image if necessary. stale, if not zero, is the root of an earlier answer that the store
	// has lost.
	Root(ctx context.Context, instance, pinned string, stale cas.Digest) (root cas.Digest, env []string, err error)
}

// A rootFS is the root file system of an action; the zero rootFS is this host's toolchain.
type rootFS struct {
	digest cas.Digest  // of the Directory; zero before the image is pulled
	tree   *tree.Input // nil before the image is pulled
	env    []string    // "KEY=VALUE"
	image  string      // its reference with a digest; "" for Task.Root
	// unpinned is set if the digest of the action does not determine the root file system.
	unpinned bool
}

// own reports whether the action sees nothing of this host.
func (r *rootFS) own() bool { return r.image != "" || !r.digest.IsZero() }

// moved reports whether result was made in an image that the action no longer gets, because its tag has moved or the
// policy's default properties have changed.
func (r *rootFS) moved(result *repb.ActionResult) bool {
	made := results.Recorded(result)
	return made.GetUnpinned() && made.GetImage() != r.image
}

// setRoot sets the root file system of req: that of t, or the image that the properties name. loadImage reads it later.
func (l *Local) setRoot(ctx context.Context, in *cas.Instance, t *Task, req *request, admission bool) error {
	if !t.Root.IsZero() || len(t.RootEnv) > 0 {
		req.root = rootFS{digest: t.Root, env: t.RootEnv, unpinned: true}
		if t.Root.IsZero() {
			return nil
		}
		var err error
		if req.root.tree, err = l.inputs.Load(ctx, in, t.Root); err != nil {
			return fault(StageFetch, fmt.Errorf("root file system %s: %w", t.Root, err))
		}
		return nil
	}
	if admission && l.cfg.Fleet { // the worker that offers the property resolves the image
		return nil
	}
	value, err := l.imageOf(t, req)
	if err != nil || value == "" {
		return err
	}
	if t.Image == "" {
		if t.Image, err = l.cfg.Images.Pin(ctx, t.Instance, value); err != nil {
			return imageFault(err)
		}
	}
	_, digest, _ := strings.Cut(t.Image, "@")
	keyed := strings.HasSuffix(value, "@"+digest) && slices.ContainsFunc(req.properties(), isImage)
	req.root = rootFS{image: t.Image, unpinned: !keyed}
	return nil
}

// imageOf returns the value of the property container-image of req or, by default, of its instance's default
// properties, or "" if there is none or the action runs with this host's toolchain instead.
func (l *Local) imageOf(t *Task, req *request) (string, error) {
	// Without Images, checkPlatform has ignored the image, or the worker offers the action's property.
	if l.cfg.Images == nil && (!l.cfg.Fleet || slices.ContainsFunc(req.properties(), isImage)) {
		return "", nil
	}
	var image Property
	for _, p := range l.cfg.Policy.Properties(req.ask(t)) {
		switch {
		case !isImage(p):
		case image.Name != "" && image.Value != p.Value:
			return "", faultf(FaultInvalid, "fetch: property %s contradicts property %s: set one of them", p, image)
		default:
			image = p
		}
	}
	switch {
	case noImage(image.Value):
		return "", nil
	case l.cfg.Images == nil: // a fleet matches no default properties, so no operator vouches for this toolchain
		return "", faultf(FaultUnmet, "fetch: %w: the default properties of the policy give action %s the property %s, and this "+
			"worker runs no images: start it with --images, or remove the property from its policy", sandbox.ErrUnsupported, req.Digest, image)
	}
	return image.Value, nil
}

// loadImage reads the tree of an image, and pulls the image again if the store has lost part of it. Clients see the
// pull if Images also has a method Progress, which returns the current pull of a pinned image, or nil.
func (l *Local) loadImage(ctx context.Context, in *cas.Instance, r *rootFS) error {
	defer pulls.Begin(ctx, func() *cloisterpb.ImagePull {
		if shown, ok := l.cfg.Images.(interface {
			Progress(instance, pinned string) *cloisterpb.ImagePull
		}); ok {
			return shown.Progress(in.Name, r.image)
		}
		return nil
	})()
	var lost *tree.MissingError
	for range 2 {
		var err error
		if r.digest, r.env, err = l.cfg.Images.Root(ctx, in.Name, r.image, r.digest); err != nil {
			return imageFault(err)
		}
		if r.tree, err = l.inputs.Load(ctx, in, r.digest); !errors.As(err, &lost) {
			return fault(StageFetch, err)
		}
		l.inputs.Invalidate(in.Name)
	}
	return faultf(FaultExhausted, "fetch: image %s: the store evicted %d of its blobs, including %s, right after they were "+
		"pulled: increase the size of the store", r.image, len(lost.Blobs), lost.Blobs[0])
}

// imageFault returns the error of an image as a Fault. Clients retry failures of the store and of this host, but not
// those of the registry, nor an image that the store never accepts.
func imageFault(err error) error {
	if errors.Is(err, errors.ErrUnsupported) || rejected(err) { // the upstream never accepts it; do not pull again
		return faultf(FaultUnmet, "%s: %w", StageFetch, err)
	}
	for _, own := range []error{
		context.Canceled, cas.ErrInvalid, cas.ErrFull, cas.ErrUpstreamFull, syscall.ENOSPC, cas.ErrUnavailable, cas.ErrUnwritable,
	} {
		if errors.Is(err, own) {
			return fault(StageFetch, err)
		}
	}
	return faultf(FaultUnmet, "%s: %w", StageFetch, err)
}
