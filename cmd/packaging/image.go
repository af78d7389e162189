// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is the user in a container, the same as in the chart and unused on the host.
const user = 65532

// image builds an image with only the program for each architecture, and writes them as one tarball of an OCI layout,
// which skopeo and podman call an oci-archive.
//
// Without a toolchain it can be a head; a worker's image adds a toolchain (docs/packaging.md).
func (b *build) image(programs map[string]string) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range b.archs {
		img, err := b.imageFor(arch, programs[arch])
		if err != nil {
			return fmt.Errorf("for %s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: arch},
		}})
	}
	dir, err := os.MkdirTemp(b.out, ".layout.*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": b.version,
	})); err != nil {
		return err
	}
	f, done, err := b.create("cloister-" + b.version + ".oci.tar")
	if err != nil {
		return err
	}
	return done(b.archive(f, dir, ""))
}

// imageFor returns the image for one architecture.
func (b *build) imageFor(arch, program string) (v1.Image, error) {
	body, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	// Layers are extracted in order, so directories come first. The user needs a name, and a directory for the store if no
	// volume is mounted there.
	passwd := fmt.Sprintf("root:x:0:0:root:/:/sbin/nologin\ncloister:x:%d:%d:cloister:/var/lib/cloister:/sbin/nologin\n", user, user)
	group := fmt.Sprintf("root:x:0:\ncloister:x:%d:\n", user)
	for _, e := range []struct {
		name string
		mode int64
		id   int
		body []byte
	}{
		{"etc/", 0o755, 0, nil},
		{"etc/group", 0o644, 0, []byte(group)},
		{"etc/passwd", 0o644, 0, []byte(passwd)},
		{"tmp/", 0o1777, 0, nil},
		{"usr/", 0o755, 0, nil},
		{"usr/bin/", 0o755, 0, nil},
		{"usr/bin/cloister", 0o755, 0, body},
		{"var/", 0o755, 0, nil},
		{"var/lib/", 0o755, 0, nil},
		{"var/lib/cloister/", 0o700, user, nil},
	} {
		h := &tar.Header{Name: e.name, Mode: e.mode, Uid: e.id, Gid: e.id, Size: int64(len(e.body)), ModTime: b.time, Format: tar.FormatUSTAR, Typeflag: tar.TypeReg}
		if e.body == nil {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.body); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(text.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: b.time}, CreatedBy: "cloister"}})
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(img, configOf(img, arch, b.version, b.time))
}

// configOf returns the configuration of containers.
func configOf(img v1.Image, arch, version string, created time.Time) *v1.ConfigFile {
	config, err := img.ConfigFile()
	if err != nil {
		panic(err) // it was made above, in memory
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, v1.Time{Time: created}
	config.Config = v1.Config{
		User:       fmt.Sprintf("%d:%d", user, user),
		Entrypoint: []string{"/usr/bin/cloister"},
		Cmd:        []string{"serve", "--dir", "/var/lib/cloister"},
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    "cloister",
			"org.opencontainers.image.version":  version,
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.source":   "https://github.com/cloister-build/cloister",
		},
	}
	return config
}

// archive writes the files below dir as a tar, sorted by name, below prefix, with one time and no owner.
func (b *build) archive(to io.Writer, dir, prefix string) error {
	var names []string
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Sort(names)
	w := tar.NewWriter(to)
	for _, name := range names {
		body, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: prefix + filepath.ToSlash(rel), Mode: 0o644, Size: int64(len(body)), ModTime: b.time, Format: tar.FormatUSTAR, Typeflag: tar.TypeReg}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := w.Write(body); err != nil {
			return err
		}
	}
	return w.Close()
}
