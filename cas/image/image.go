// SPDX-License-Identifier: Apache-2.0

// Package image turns container images into input trees: an image becomes a Directory in a store, which is staged like
// the input root of an action. Images come from registries, OCI layouts and the output of docker save. The package runs
// nothing and mounts nothing.
//
// A layer is hostile input, and so is everything that a registry sends:
//
//   - Sizes, numbers of entries, depths and lengths of paths are limited, also for what decompression yields.
//   - Content that does not have its digest is an error. A layer is applied only once its digests have matched.
//   - Paths are resolved in the tree that is being built, never on a file system. A path with ".." is refused. A parent
//     that is a symlink leads to another place in the tree, as it does for container engines, and never out of it.
//   - Devices, sockets and pipes are dropped, as are owners, set-ID bits, extended attributes and times. What remains
//     of a mode is whether a file is executable.
//   - URLs in manifests are not followed: the operator permits registries, not what their images refer to.
//
// The same image always gives the same root digest.
package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"runtime"

	"github.com/cloister-build/cloister/cas"
	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

var (
	// ErrTooLarge is returned for an image beyond the Limits.
	ErrTooLarge = errors.New("too large")
	// ErrLayer is returned for a layer that cannot be a part of an input tree.
	ErrLayer = errors.New("refused")
	// ErrDigest is returned for content that does not match its digest.
	ErrDigest = errors.New("wrong digest")
	// ErrPlatform is returned for an image that is not for the platform of the Config.
	ErrPlatform = errors.New("wrong platform")
)

// Limits bound an image. Zero fields have the values of DefaultLimits.
type Limits struct {
	// Bytes bounds the size of all layers together, compressed and decompressed.
	Bytes int64
	// Entries bounds the number of entries in all layers together, and the number in the tree.
	Entries int
}

// DefaultLimits suit images of compilers and SDKs. A tree of more entries could not be an input root.
var DefaultLimits = Limits{Bytes: 16 << 30, Entries: 1_000_000}

// Config configures reading an image. Store and Function are required.
type Config struct {
	Store    cas.Store
	Function cas.Function
	// Dir is the directory for temporary files, which hold large files while they are hashed; "" is the system's.
	Dir string
	// Platform selects from an image for several; the zero Platform is Linux on this architecture.
	Platform v1.Platform
	Limits   Limits
	// Keychain has the credentials for registries; nil is that of Docker's configuration and credential helpers.
	Keychain authn.Keychain
	// Transport makes the calls to registries; nil is the default of go-containerregistry.
	Transport http.RoundTripper
	// Progress, if not nil, is called repeatedly with the compressed bytes read so far and their total, which is 0 if
	// unknown. It is called concurrently.
	Progress func(done, total int64)
	// asking is called with 1 when a call begins to wait for the registry, and with -1 when that call returns. It is
	// called concurrently.
	asking func(change int64)
	// Log receives retries; nil discards them.
	Log *slog.Logger
}

// An Image is an image whose files are in a store.
type Image struct {
	// Reference is the name by which the image was requested: a name in a registry with its tag or digest.
	Reference string
	// Digest identifies the content of the image, as "sha256:" and a hash: of the manifest for the platform, or, for the
	// output of docker save, which has no manifest, of the configuration (the image ID).
	Digest string
	// Root is the tree.
	Root cas.Digest
	// Env is the environment of the image's configuration, as KEY=VALUE.
	Env []string
	// Entries, Files and Bytes are the number of entries in the tree, and the number and total size of the files.
	Entries, Files int
	Bytes          int64
	// Dropped is the number of devices, sockets and pipes that are not in the tree.
	Dropped int
}

// complete fills in the defaults.
func (c *Config) complete() error {
	switch {
	case c.Store == nil:
		return errors.New("image: Config.Store is nil")
	case c.Function == 0:
		return errors.New("image: Config.Function is missing")
	}
	c.Platform.OS = cmp.Or(c.Platform.OS, "linux")
	c.Platform.Architecture = cmp.Or(c.Platform.Architecture, runtime.GOARCH)
	if c.Limits.Bytes <= 0 {
		c.Limits.Bytes = DefaultLimits.Bytes
	}
	if c.Limits.Entries <= 0 {
		c.Limits.Entries = DefaultLimits.Entries
	}
	if c.Keychain == nil {
		c.Keychain = authn.DefaultKeychain
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Progress == nil {
		c.Progress = func(int64, int64) {}
	}
	if c.asking == nil {
		c.asking = func(int64) {}
	}
	return nil
}

// Pull stores the image that ref names in its registry. Errors of the registry contain its message. Other errors are
// ErrTooLarge, ErrLayer, ErrDigest and ErrPlatform, and those of the store.
func Pull(ctx context.Context, c Config, ref Reference) (*Image, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	c.asking(1)
	src, err := c.fromRegistry(ctx, ref)
	c.asking(-1)
	if err != nil {
		return nil, fmt.Errorf("pull image %s: %w", ref, ended(ctx, err))
	}
	im, err := c.read(ctx, src)
	if err != nil {
		return nil, fmt.Errorf("pull image %s: %w", ref, ended(ctx, err))
	}
	im.Reference = ref.String()
	return im, nil
}

// Load stores the image at path, which is an OCI layout (a directory) or the output of docker save. If it has several
// images, name selects one: a tag or a digest of the layout, or a name of docker save; it may be "". The Reference is
// the image's name in the file, if it has one. Errors are as those of Pull.
func Load(ctx context.Context, c Config, path, name string) (*Image, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	src, err := c.fromPath(path, name)
	if err != nil {
		return nil, fmt.Errorf("load image %+.256q: %w", path, err)
	}
	im, err := c.read(ctx, src)
	if err != nil {
		return nil, fmt.Errorf("load image %+.256q: %w", path, ended(ctx, err))
	}
	im.Reference = src.name
	return im, nil
}

// fromPath opens a layout or the output of docker save.
func (c *Config) fromPath(path, name string) (*source, error) {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case st.IsDir():
		return c.fromLayout(path, name)
	}
	return c.fromArchive(path, name)
}

// ended returns the cause if ctx has ended, otherwise err.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
