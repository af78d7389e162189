// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cloister-build/cloister/cas"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sync/errgroup"
)

// Limits of the messages about an image, which are read into memory.
const (
	maxMessage = 4 << 20 // bytes of an index, a manifest or a configuration
	maxLayers  = 500     // Docker permits 127
	maxIndexes = 4       // nested
	parallel   = 3       // layers that are read at a time
)

// A source is an opened image.
type source struct {
	name   string // in a file
	digest string // of Image
	config *v1.ConfigFile
	layers []layer
	total  int64 // compressed bytes; 0 is unknown
}

// read reads the layers of an image and stores its tree.
func (c *Config) read(ctx context.Context, src *source) (*Image, error) {
	if err := c.check(src); err != nil {
		return nil, err
	}
	u := &used{limits: c.Limits, progress: func(done int64) { c.Progress(done, src.total) }}
	ops := make([][]op, len(src.layers))
	g, reading := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i := range src.layers {
		g.Go(func() (err error) {
			ops[i], err = c.readLayer(reading, &src.layers[i], u)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	b := newBuilder(c.Limits)
	for i := range ops {
		if err := b.apply(ctx, ops[i]); err != nil {
			return nil, fmt.Errorf("layer %s: %w", src.layers[i].name, err)
		}
		ops[i] = nil
	}
	im := &Image{Digest: src.digest, Env: src.config.Config.Env, Dropped: int(u.dropped.Load())}
	batch := cas.NewBatch(c.Store)
	var n count
	var err error
	if im.Root, err = b.root.put(ctx, c.Function, batch, &n, c.Limits, "", 0); err != nil {
		return nil, err
	}
	im.Entries, im.Files, im.Bytes = n.entries, n.files, n.bytes
	return im, batch.Flush(ctx)
}

// check checks what the manifest and the configuration say.
func (c *Config) check(src *source) error {
	cf := src.config
	if want := c.Platform; cf.OS != "" && cf.OS != want.OS || cf.Architecture != "" && cf.Architecture != want.Architecture {
		return &classified{ErrPlatform, fmt.Sprintf("the image is for %s/%s, not for %s", cf.OS, cf.Architecture, want)}
	}
	if n := len(src.layers); n > maxLayers {
		return tooLarge("it has %d layers, more than %d", n, maxLayers)
	}
	if ids := cf.RootFS.DiffIDs; len(ids) != len(src.layers) {
		return refuse("the manifest has %d layers and the configuration %d", len(src.layers), len(ids))
	}
	for i := range src.layers {
		l := &src.layers[i]
		l.diffID = cf.RootFS.DiffIDs[i]
		for _, h := range []v1.Hash{l.digest, l.diffID} {
			if h != (v1.Hash{}) && h.Algorithm != "sha256" {
				return refuse("layer %s has a digest %q, which is not of SHA-256", l.name, h.Algorithm)
			}
		}
		if l.diffID == (v1.Hash{}) {
			return refuse("layer %s has no digest in the configuration", l.name)
		}
		if src.total += l.size; l.size < 0 || src.total > c.Limits.Bytes {
			return tooLarge("its layers have more than %d bytes", c.Limits.Bytes)
		}
	}
	return nil
}

// fromManifest returns the source for a manifest. blob returns the reader for a layer.
func fromManifest(raw, config []byte, blob func(context.Context, v1.Hash) (io.ReadCloser, error)) (*source, error) {
	var m v1.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, refuse("the manifest is malformed: %v", err)
	}
	if got := sum(config); m.Config.Digest.String() != got {
		return nil, &classified{ErrDigest, fmt.Sprintf("the configuration has the digest %s, not %s as stated", got,
			m.Config.Digest)}
	}
	src := &source{digest: sum(raw)}
	var err error
	if src.config, err = parseConfig(config); err != nil {
		return nil, err
	}
	for i := range m.Layers {
		d := &m.Layers[i]
		name := fmt.Sprintf("%d (%s)", i+1, d.Digest)
		if len(d.URLs) > 0 {
			return nil, refuse("layer %s: it refers to %q instead of the registry", name, d.URLs[0])
		}
		if d.Digest == (v1.Hash{}) {
			return nil, refuse("layer %s has no digest", name)
		}
		src.layers = append(src.layers, layer{
			name: name, digest: d.Digest, size: d.Size,
			open: func(ctx context.Context) (io.ReadCloser, error) { return blob(ctx, d.Digest) },
		})
	}
	return src, nil
}

func parseConfig(config []byte) (*v1.ConfigFile, error) {
	var cf v1.ConfigFile
	if err := json.Unmarshal(config, &cf); err != nil {
		return nil, refuse("the configuration is malformed: %v", err)
	}
	return &cf, nil
}

// sum returns the digest of b as images state it.
func sum(b []byte) string {
	s := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(s[:])
}

// options returns the options of calls to registries.
func (c *Config) options(ctx context.Context) []remote.Option {
	o := []remote.Option{
		remote.WithContext(ctx), remote.WithAuthFromKeychain(patientKeychain{c.Keychain}), remote.WithPlatform(c.Platform),
		remote.WithUserAgent("cloister"),
	}
	if c.Transport != nil {
		o = append(o, remote.WithTransport(c.Transport))
	}
	return o
}

// Resolve returns the digest that ref has in its registry now: that of a manifest, or of an index for several
// platforms. It makes no call if the reference has a digest.
func Resolve(ctx context.Context, c Config, ref Reference) (string, error) {
	if err := c.complete(); err != nil {
		return "", err
	}
	if d := ref.Digest(); d != "" {
		return d, nil
	}
	d, err := remote.Head(ref.ref, c.options(ctx)...)
	if err != nil {
		// Some registries answer HEAD without a digest, and none gives a reason.
		got, err := remote.Get(ref.ref, c.options(ctx)...)
		if err != nil {
			return "", fmt.Errorf("resolve image %s: %w", ref, ended(ctx, err))
		}
		return got.Digest.String(), nil
	}
	return d.Digest.String(), nil
}

// fromRegistry opens an image in a registry.
func (c *Config) fromRegistry(ctx context.Context, ref Reference) (*source, error) {
	desc, err := remote.Get(ref.ref, c.options(ctx)...)
	if err != nil {
		return nil, err
	}
	if err := checkManifest(desc.Manifest); err != nil {
		return nil, err
	}
	im, err := desc.Image()
	if err != nil {
		return nil, err
	}
	raw, err := im.RawManifest()
	if err == nil {
		err = checkManifest(raw)
	}
	if err != nil {
		return nil, err
	}
	m, err := im.Manifest()
	if err != nil {
		return nil, err
	}
	if m.Config.Size < 0 || m.Config.Size > maxMessage { // a negative one would mean that it is unknown
		return nil, tooLarge("its configuration has %d bytes", m.Config.Size)
	}
	config, err := im.RawConfigFile()
	if err != nil {
		return nil, err
	}
	return fromManifest(raw, config, func(ctx context.Context, h v1.Hash) (io.ReadCloser, error) {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		l, err := im.LayerByDigest(h)
		if err != nil {
			return nil, err
		}
		return l.Compressed()
	})
}

// checkManifest checks the size of a manifest or an index before it is parsed.
func checkManifest(raw []byte) error {
	if len(raw) > maxMessage {
		return tooLarge("its manifest has %d bytes", len(raw))
	}
	return nil
}

// A layoutDir is an OCI layout (image-layout.md of the OCI image specification).
type layoutDir string

// open opens a blob. A digest has been checked to be one, so it is a file name.
func (l layoutDir) open(h v1.Hash) (*os.File, error) {
	return os.Open(filepath.Join(string(l), "blobs", h.Algorithm, h.Hex))
}

// message reads a blob that is a message.
func (l layoutDir) message(h v1.Hash) ([]byte, error) {
	f, err := l.open(h)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := readMessage(f)
	if err == nil && sum(b) != h.String() {
		err = &classified{ErrDigest, fmt.Sprintf("blob %s has the digest %s", h, sum(b))}
	}
	return b, err
}

func readMessage(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxMessage+1))
	if err == nil && len(b) > maxMessage {
		err = tooLarge("an index, manifest or configuration has more than %d bytes", maxMessage)
	}
	return b, err
}

// refName is the annotation with the tag of an image in a layout.
const refName = "org.opencontainers.image.ref.name"

// fromLayout opens an image in an OCI layout.
func (c *Config) fromLayout(path, name string) (*source, error) {
	dir := layoutDir(path)
	f, err := os.Open(filepath.Join(path, "index.json"))
	if err != nil {
		return nil, fmt.Errorf("it is not an OCI layout: %w", err)
	}
	defer f.Close()
	raw, err := readMessage(f)
	if err != nil {
		return nil, err
	}
	var tag string
	for range maxIndexes {
		var index v1.IndexManifest
		if err := json.Unmarshal(raw, &index); err != nil {
			return nil, refuse("an index is malformed: %v", err)
		}
		d, err := c.choose(&index, name)
		if err != nil {
			return nil, err
		}
		if t := d.Annotations[refName]; t != "" {
			tag = t
		}
		name = "" // it selects in index.json
		if raw, err = dir.message(d.Digest); err != nil {
			return nil, err
		}
		if d.MediaType.IsIndex() {
			continue
		}
		var m v1.Manifest
		if err := json.Unmarshal(raw, &m); err != nil {
			return nil, refuse("the manifest is malformed: %v", err)
		}
		config, err := dir.message(m.Config.Digest)
		if err != nil {
			return nil, err
		}
		src, err := fromManifest(raw, config, func(_ context.Context, h v1.Hash) (io.ReadCloser, error) { return dir.open(h) })
		if err == nil {
			src.name = tag
		}
		return src, err
	}
	return nil, refuse("its indexes are nested more than %d times", maxIndexes)
}

// choose returns the image with a name, or the only one for the platform.
func (c *Config) choose(index *v1.IndexManifest, name string) (*v1.Descriptor, error) {
	var found []*v1.Descriptor
	var names []string
	for i := range index.Manifests {
		d := &index.Manifests[i]
		names = append(names, d.Annotations[refName])
		switch {
		case name != "" && name != d.Annotations[refName] && name != d.Digest.String():
		case !d.MediaType.IsImage() && !d.MediaType.IsIndex():
		case d.Platform != nil && !d.Platform.Satisfies(v1.Platform{OS: c.Platform.OS, Architecture: c.Platform.Architecture}):
		default:
			found = append(found, d)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case name != "":
		return nil, fmt.Errorf("it has %d images named %+.256q for %s: %w; it has %+.500q", len(found), name, c.Platform,
			cas.ErrNotFound, names)
	case len(found) == 0:
		return nil, &classified{ErrPlatform, fmt.Sprintf("it has no image for %s", c.Platform)}
	}
	return nil, fmt.Errorf("it has %d images for %s: name one of %+.500q", len(found), c.Platform, names)
}

// fromArchive opens an image in the output of docker save.
func (c *Config) fromArchive(path, name string) (*source, error) {
	open := func() (io.ReadCloser, error) { return os.Open(path) }
	all, err := tarball.LoadManifest(open)
	if err != nil {
		return nil, fmt.Errorf("it is neither an OCI layout nor the output of docker save: %w", err)
	}
	var found []int
	var names []string
	for i, d := range all {
		names = append(names, d.RepoTags...)
		for _, t := range append([]string{""}, d.RepoTags...) {
			if t == name || name != "" && full(t) == full(name) {
				found = append(found, i)
				break
			}
		}
	}
	if len(found) == 0 && name != "" {
		return nil, fmt.Errorf("image %+.256q: %w: name one of %+.500q", name, cas.ErrNotFound, names)
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("it has %d images: name one of %+.500q", len(all), names)
	}
	d := all[found[0]]
	config, err := fileOf(open, d.Config)
	if err != nil {
		return nil, err
	}
	defer config.Close()
	raw, err := readMessage(config)
	if err != nil {
		return nil, err
	}
	src := &source{digest: sum(raw), name: name}
	if len(d.RepoTags) > 0 && name == "" {
		src.name = d.RepoTags[0]
	}
	if src.config, err = parseConfig(raw); err != nil {
		return nil, err
	}
	for i, file := range d.Layers {
		src.layers = append(src.layers, layer{
			name: fmt.Sprintf("%d (%+.100q)", i+1, file),
			open: func(context.Context) (io.ReadCloser, error) { return fileOf(open, file) },
		})
	}
	return src, nil
}

// full returns the full name of a reference, or s if it is not one.
func full(s string) string {
	if r, err := ParseReference(s); err == nil {
		return r.String()
	}
	return s
}
