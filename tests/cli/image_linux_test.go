// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// registry serves an empty registry of container images at $REGISTRY until the story ends.
func (s *story) registry([]string) error {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	s.Cleanup(server.Close)
	s.script.Setenv("REGISTRY", strings.TrimPrefix(server.URL, "http://"))
	return nil
}

// image makes an image with a shell and the file /etc/marker, which has a line of text, pushes it to $REGISTRY/TAG, and writes
// it as an OCI layout to the directory $WORK/NAME. $NAME becomes its reference with a digest.
func (s *story) image(args []string) error {
	tag, text := args[0], args[1]
	im, err := s.makeImage(text)
	if err != nil {
		return err
	}
	to, err := name.ParseReference(s.script.Getenv("REGISTRY") + "/" + tag)
	if err != nil {
		return err
	}
	if err := remote.Write(to, im); err != nil {
		return err
	}
	digest, err := im.Digest()
	if err != nil {
		return err
	}
	short := strings.ReplaceAll(tag, ":", "_")
	s.script.Setenv(short, to.Context().Digest(digest.String()).String())
	at, err := layout.Write(filepath.Join(s.work, short), empty.Index)
	if err != nil {
		return err
	}
	return at.AppendImage(im)
}

func (s *story) makeImage(text string) (v1.Image, error) {
	sandboxtest.Tool(s, "ldd")
	at := s.TempDir()
	root, err := os.OpenRoot(at)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	sandboxtest.CopyPrograms(s, root, "sh", "cat", "ls")
	if err := root.MkdirAll("etc", 0o755); err != nil {
		return nil, err
	}
	if err := root.WriteFile("etc/marker", []byte(text+"\n"), 0o644); err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.AddFS(os.DirFS(at)); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil {
		return nil, err
	}
	im, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, err
	}
	config, err := im.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Config.Env = "linux", runtime.GOARCH, []string{"PATH=/bin", fmt.Sprintf("MARK=%s", text)}
	return mutate.ConfigFile(im, config)
}
