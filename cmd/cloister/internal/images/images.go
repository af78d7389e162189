// SPDX-License-Identifier: Apache-2.0

// Package images gives actions the container images that their properties name, if the operator permits these.
package images

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cmd/cloister/internal/imageservice"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/worker"
)

// Config configures a Provider.
type Config struct {
	// Instances are the stores that receive the images, and Dir is the directory for temporary files.
	Instances cas.Instances
	Dir       string
	// File keeps the names of the images that are present; without it, Close
	// forgets them.
	File  string
	Rules policy.Images
	Log   *slog.Logger
}

// A Provider implements worker.Images for a Library. The caller of Open closes the Library.
type Provider struct {
	*image.Library
	environment bool
}

var _ worker.Images = (*Provider)(nil)

// Open opens the Library of a server or of a single command.
func Open(c Config) (*Provider, error) {
	library, err := image.OpenLibrary(image.LibraryConfig{
		Config: image.Config{
			Function: cas.SHA256, Dir: c.Dir, Limits: image.Limits{Bytes: c.Rules.MaxBytes}, Log: c.Log,
		},
		Path: c.File, Instances: c.Instances, Allowed: c.Rules.Registries, MaxPull: c.Rules.MaxPull,
	})
	if err != nil {
		return nil, err
	}
	return &Provider{library, !c.Rules.NoEnvironment}, nil
}

// Schemes of the property container-image: an image of a registry, and one that was loaded from a file.
const (
	docker = "docker://"
	loaded = "oci:"
)

// Pin implements worker.Images.
func (p *Provider) Pin(ctx context.Context, instance, value string) (string, error) {
	name, remote := strings.CutPrefix(value, docker)
	if !remote {
		var ok bool
		if name, ok = strings.CutPrefix(value, loaded); !ok {
			return "", fmt.Errorf("container-image %+.256q: %w: write docker://REGISTRY/REPOSITORY@DIGEST, or oci:NAME for a loaded image",
				value, cas.ErrInvalid)
		}
	}
	ref, err := image.ParseReference(name)
	if err != nil {
		return "", err
	}
	if !remote {
		e, err := p.Loaded(instance, ref)
		if err != nil {
			return "", fmt.Errorf("%w; see cloister image load", err)
		}
		return e.Pinned, nil
	}
	pinned, err := p.Library.Pin(ctx, instance, ref)
	return pinned, advise(ref, err)
}

// Root implements worker.Images.
func (p *Provider) Root(ctx context.Context, instance, pinned string, stale cas.Digest) (root cas.Digest, env []string, err error) {
	ref, err := image.ParseReference(pinned)
	if err != nil {
		return root, nil, err
	}
	e, err := p.Get(ctx, instance, ref, stale)
	if err != nil {
		return root, nil, advise(ref, err)
	}
	if p.environment {
		env = e.Env
	}
	return e.Root, env, nil
}

// Progress returns the current pull of a pinned image, or nil. Package service shows it to clients.
func (p *Provider) Progress(instance, pinned string) *cloisterpb.ImagePull {
	return imageservice.PullMessage(p.Library.Progress(instance, pinned))
}

// advise adds the operator's options to the refusal of a registry.
func advise(ref image.Reference, err error) error {
	if errors.Is(err, image.ErrNotAllowed) {
		return fmt.Errorf("%w; allow it with --images=%s, or ignore images with --images=ignore to run such actions with the toolchain of "+
			"this machine", err, ref.Registry())
	}
	return err
}
