// SPDX-License-Identifier: Apache-2.0

// Package containers makes container images for tests, and serves them from registries.
package containers

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Registry serves an empty registry on loopback until the test ends, and returns its host and port.
func Registry(t testing.TB) string { return HeldRegistry(t, new(sync.RWMutex)) }

// HeldRegistry is Registry, but it sends no blobs while gate is locked.
func HeldRegistry(t testing.TB, gate *sync.RWMutex) string {
	blobs := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			gate.RLock()
			defer gate.RUnlock()
		}
		blobs.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// RegistryProcess is Registry with a process of Docker's registry.
func RegistryProcess(t testing.TB) string {
	t.Helper()
	return registryProcess(t, "")
}

// Builder authenticates to a PrivateRegistry.
var Builder = authn.Basic{Username: "builder", Password: "secret"}

// PrivateRegistry is RegistryProcess for Builder only.
func PrivateRegistry(t testing.TB) string {
	t.Helper()
	users := filepath.Join(t.TempDir(), "htpasswd")
	line := Builder.Username + ":$2a$04$pzKcxOSBLG9.4UTGT4y2wuj2Ly4/bcgr/Xh1O08VGWjaUr5VN8N2y\n" // bcrypt of the password
	must.Succeed(t, os.WriteFile(users, []byte(line), 0o600))
	return registryProcess(t, fmt.Sprintf("auth: {htpasswd: {realm: registry, path: %q}}\n", users))
}

// registryProcess starts a registry with additional configuration.
func registryProcess(t testing.TB, more string) string {
	t.Helper()
	sandboxtest.Tool(t, "docker-registry")
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t) // clients use HTTP for this address only
	address := l.Addr().String()
	l.Close()
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s/blobs}}\nhttp: {addr: %q}\n", dir, address) + more
	must.Succeed(t, os.WriteFile(config, []byte(text), 0o644))
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "docker-registry", "serve", config)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	for {
		if c, err := net.Dial("tcp", address); err == nil {
			c.Close()
			return address
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("docker-registry: %v", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Push pushes an image to a registry under a name with a tag, and returns its reference with a digest.
func Push(t testing.TB, ref string, im v1.Image, options ...remote.Option) string {
	t.Helper()
	to := must.Get(name.ParseReference(ref))(t)
	must.Succeed(t, remote.Write(to, im, options...))
	digest := must.Get(im.Digest())(t)
	return to.Context().Digest(digest.String()).String()
}

// Image makes an image for this architecture with programs of this host in /bin, and with the file /etc/marker, which
// contains mark and a newline. Its environment is PATH=/bin and MARK.
func Image(t testing.TB, mark string, programs ...string) v1.Image {
	t.Helper()
	layer := bytes.NewBuffer(files(t, mark, programs))
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	must.Succeed(t, err)
	im := must.Get(mutate.AppendLayers(empty.Image, l))(t)
	config := must.Get(im.ConfigFile())(t).DeepCopy()
	config.OS, config.Architecture, config.Config.Env = "linux", runtime.GOARCH, []string{"PATH=/bin", "MARK=" + mark}
	return must.Get(mutate.ConfigFile(im, config))(t)
}

// files returns the files of an image as a tar archive.
func files(t testing.TB, mark string, programs []string) []byte {
	t.Helper()
	at := t.TempDir()
	root := must.Get(os.OpenRoot(at))(t)
	defer root.Close()
	sandboxtest.CopyPrograms(t, root, programs...)
	must.Succeed(t, root.MkdirAll("etc", 0o755))
	must.Succeed(t, root.WriteFile("etc/marker", []byte(mark+"\n"), 0o644))
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	must.Succeed(t, w.AddFS(os.DirFS(at)))
	must.Succeed(t, w.Close())
	return archive.Bytes()
}
