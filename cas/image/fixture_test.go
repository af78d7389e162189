// SPDX-License-Identifier: Apache-2.0

package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"runtime"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Entries of layers.

func file(name, content string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), Uname: content}
}

func program(name, content string) tar.Header {
	h := file(name, content)
	h.Mode = 0o4755
	return h
}

func dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o700} }

func symlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
}

func hardLink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}
}

func special(name string, kind byte) tar.Header { return tar.Header{Typeflag: kind, Name: name} }

// archive returns entries as a tar archive. The content of a file is in its Uname.
func archive(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Uname = h.Uname, ""
		}
		h.Uid, h.Gid = 1000, 1000
		must.Succeed(t, w.WriteHeader(&h))
		must.Get(io.WriteString(w, content))(t)
	}
	must.Succeed(t, w.Close())
	return b.Bytes()
}

// layerOf returns an archive as a layer.
func layerOf(t *testing.T, data []byte, options ...tarball.LayerOption) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		options...)
	must.Succeed(t, err)
	return l
}

// imageOf returns an image for this architecture.
func imageOf(t *testing.T, layers ...v1.Layer) v1.Image {
	return imageFor(t, runtime.GOARCH, layers...)
}

func imageFor(t *testing.T, architecture string, layers ...v1.Layer) v1.Image {
	t.Helper()
	im := must.Get(mutate.AppendLayers(empty.Image, layers...))(t)
	cf := must.Get(im.ConfigFile())(t)
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", architecture
	cf.Config.Env = []string{"PATH=/opt/bin:/bin", "LANG=C"}
	return must.Get(mutate.ConfigFile(im, cf))(t)
}

// simple returns an image with one file, /bin/tool, with this content.
func simple(t *testing.T, content string) v1.Image {
	return imageOf(t, layerOf(t, archive(t, program("bin/tool", content))))
}

// layoutOf writes images to an OCI layout and returns its directory.
func layoutOf(t *testing.T, images ...v1.Image) string {
	t.Helper()
	p := must.Get(layout.Write(t.TempDir(), empty.Index))(t)
	for _, im := range images {
		must.Succeed(t, p.AppendImage(im))
	}
	return string(p)
}

func config(t *testing.T) image.Config {
	return image.Config{Store: castest.NewMemory(), Function: cas.SHA256, Dir: t.TempDir()}
}

// load writes an image to a layout and loads it.
func load(t *testing.T, c image.Config, im v1.Image) (*image.Image, error) {
	t.Helper()
	return image.Load(t.Context(), c, layoutOf(t, im), "")
}

// list returns the entries of a tree: directories as "d/", files as "f=content" or with "*" if they are executable,
// symlinks as "s->target". It checks that the tree can be an input root.
func list(t *testing.T, s cas.Store, root cas.Digest) string {
	t.Helper()
	if _, err := tree.Load(t.Context(), s, root); err != nil {
		t.Fatalf("the tree cannot be an input root: %v", err)
	}
	var lines []string
	listBelow(t, s, root, "", &lines)
	return strings.Join(lines, " ")
}

func listBelow(t *testing.T, s cas.Store, d cas.Digest, at string, lines *[]string) {
	t.Helper()
	var m repb.Directory
	must.Succeed(t, cas.ReadProto(t.Context(), s, d, &m))
	for _, n := range m.Directories {
		*lines = append(*lines, at+n.Name+"/")
		below := must.Get(cas.FromProto(cas.SHA256, n.Digest))(t)
		listBelow(t, s, below, at+n.Name+"/", lines)
	}
	for _, n := range m.Files {
		below := must.Get(cas.FromProto(cas.SHA256, n.Digest))(t)
		content := must.Get(cas.ReadAll(context.Background(), s, below, 1<<30))(t)
		exec := ""
		if n.IsExecutable {
			exec = "*"
		}
		*lines = append(*lines, at+n.Name+exec+"="+string(content))
	}
	for _, n := range m.Symlinks {
		*lines = append(*lines, at+n.Name+"->"+n.Target)
	}
}

var zstdLayer = tarball.WithCompression(compression.ZStd)
