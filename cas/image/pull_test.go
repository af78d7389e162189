// SPDX-License-Identifier: Apache-2.0

package image_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// A server is a registry whose answers a test can change.
type server struct {
	*httptest.Server
	host string
	mu   sync.Mutex
	// before is called before each request that reads; it returns whether it has answered.
	before func(http.ResponseWriter, *http.Request) bool
	layers atomic.Int64 // requests for blobs
}

func serve(t *testing.T) *server {
	t.Helper()
	s := &server{}
	r := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		s.mu.Lock()
		before := s.before
		s.mu.Unlock()
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			s.layers.Add(1)
		}
		if before != nil && before(w, req) {
			return
		}
		r.ServeHTTP(w, req)
	}))
	t.Cleanup(s.Close)
	s.host = strings.TrimPrefix(s.URL, "http://")
	return s
}

// intercept sets before.
func (s *server) intercept(f func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = f
}

// push stores an image and returns its reference.
func (s *server) push(t *testing.T, repository string, im v1.Image) image.Reference {
	t.Helper()
	ref := reference(t, s.host+"/"+repository)
	must.Succeed(t, remote.Write(must.Get(name.ParseReference(ref.String()))(t), im))
	return ref
}

func reference(t *testing.T, s string) image.Reference {
	t.Helper()
	return must.Get(image.ParseReference(s))(t)
}

func digestOf(t *testing.T, im interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	return must.Get(im.Digest())(t).String()
}

// TestPull: a pull by tag or digest returns the tree, the manifest's digest and the environment.
func TestPull(t *testing.T) {
	s, im := serve(t), simple(t, "one")
	byTag := s.push(t, "team/tools:v1", im)
	byDigest := reference(t, byTag.Pin(digestOf(t, im)))
	for _, ref := range []image.Reference{byTag, byDigest} {
		c := config(t)
		got := must.Get(image.Pull(t.Context(), c, ref))(t)
		expect.Equal(t, list(t, c.Store, got.Root), "bin/ bin/tool*=one", "%s", ref)
		if got.Digest != digestOf(t, im) || got.Reference != ref.String() ||
			strings.Join(got.Env, " ") != "PATH=/opt/bin:/bin LANG=C" {
			t.Errorf("got %+v, want digest %s and the environment of the image", got, digestOf(t, im))
		}
	}
}

// TestPullSelectsThePlatform: a pull selects the host's platform from an index, and refuses images for others.
func TestPullSelectsThePlatform(t *testing.T) {
	s := serve(t)
	other := "arm64"
	if runtime.GOARCH == other {
		other = "amd64"
	}
	foreign := imageFor(t, other, layerOf(t, archive(t, file("a", "foreign"))))
	own := imageOf(t, layerOf(t, archive(t, file("a", "own"))))
	index := func(of map[string]v1.Image) v1.ImageIndex {
		var all v1.ImageIndex = empty.Index
		for _, arch := range []string{"s390x", "arm64", "amd64"} {
			if im := of[arch]; im != nil {
				all = mutate.AppendManifests(all, mutate.IndexAddendum{
					Add: im, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
				})
			}
		}
		return all
	}
	push := func(repository string, ix v1.ImageIndex) image.Reference {
		to := must.Get(name.ParseReference(s.host + "/" + repository))(t)
		must.Succeed(t, remote.WriteIndex(to, ix))
		return reference(t, to.String())
	}
	c := config(t)
	got, err := image.Pull(t.Context(), c, push("both:1", index(map[string]v1.Image{other: foreign, runtime.GOARCH: own})))
	must.Succeed(t, err)
	if l := list(t, c.Store, got.Root); l != "a=own" || got.Digest != digestOf(t, own) {
		t.Errorf("got %s of %s, want a=own of %s", l, got.Digest, digestOf(t, own))
	}
	if _, err := image.Pull(t.Context(), c, push("foreign:1", index(map[string]v1.Image{other: foreign}))); err == nil ||
		!strings.Contains(err.Error(), runtime.GOARCH) {
		t.Errorf("an index without the platform: got %v, want an error that names %s", err, runtime.GOARCH)
	}
	if _, err := image.Pull(t.Context(), c, s.push(t, "alone:1", foreign)); !errors.Is(err, image.ErrPlatform) ||
		!strings.Contains(err.Error(), "linux/"+other) {
		t.Errorf("an image for %s: got %v, want ErrPlatform with both platforms", other, err)
	}
}

// TestPullRefusesWrongContent: content without its digest is refused wherever it is, and so are references to other
// hosts.
func TestPullRefusesWrongContent(t *testing.T) {
	large := archive(t, file("a", strings.Repeat("x", 1000)))
	t.Run("a layer of a registry", func(t *testing.T) {
		s, im := serve(t), imageOf(t, layerOf(t, large))
		ref := s.push(t, "a:1", im)
		layers := must.Get(im.Layers())(t)
		s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, digestOf(t, layers[0])) {
				return false
			}
			n, err := layers[0].Size()
			expect.Error(t, err, nil)
			b := bytes.Repeat([]byte{'x'}, int(n))
			_, _ = w.Write(b) // the client may have left
			return true
		})
		_, err := image.Pull(t.Context(), config(t), ref)
		expect.That(t, errors.Is(err, image.ErrDigest) && strings.Contains(err.Error(), "layer 1 (sha256:"),
			"got %v, want ErrDigest of layer 1", err)
	})
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string, im v1.Image)
		want   string
	}{
		{"a layer of a layout", func(t *testing.T, dir string, im v1.Image) {
			layers := must.Get(im.Layers())(t)
			other := must.Get(layerOf(t, archive(t, file("a", strings.Repeat("y", 1000)))).Compressed())(t)
			overwrite(t, dir, digestOf(t, layers[0]), must.Get(io.ReadAll(other))(t))
		}, "): the content has the digest"},
		{"a configuration", func(t *testing.T, dir string, im v1.Image) {
			overwrite(t, dir, must.Get(im.ConfigName())(t).String(), []byte("{}"))
		}, "has the digest"},
		{
			"a manifest", func(t *testing.T, dir string, im v1.Image) { overwrite(t, dir, digestOf(t, im), []byte("{}")) },
			"has the digest",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			im := imageOf(t, layerOf(t, large))
			dir := layoutOf(t, im)
			c.damage(t, dir, im)
			if _, err := image.Load(t.Context(), config(t), dir, ""); !errors.Is(err, image.ErrDigest) ||
				!strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want ErrDigest with %q", err, c.want)
			}
		})
	}
	t.Run("what the configuration states of a layer", func(t *testing.T) {
		im := imageOf(t, layerOf(t, large))
		cf := must.Get(im.ConfigFile())(t)
		cf = cf.DeepCopy()
		cf.RootFS.DiffIDs[0].Hex = strings.Repeat("0", 64)
		im = must.Get(mutate.ConfigFile(im, cf))(t)
		if _, err := load(t, config(t), im); !errors.Is(err, image.ErrDigest) ||
			!strings.Contains(err.Error(), "decompressed content") {
			t.Errorf("got %v, want ErrDigest of the decompressed content", err)
		}
	})
	t.Run("a layer elsewhere", func(t *testing.T) {
		asked := atomic.Bool{}
		elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Store(true) }))
		defer elsewhere.Close()
		im := must.Get(mutate.Append(imageOf(t), mutate.Addendum{
			Layer: layerOf(t, large),
			URLs:  []string{elsewhere.URL + "/layer"},
		}))(t)
		s := serve(t)
		ref := s.push(t, "a:1", im)
		s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
			layers, err := im.Layers()
			if err != nil || !strings.HasSuffix(r.URL.Path, digestOf(t, layers[0])) {
				return false
			}
			w.WriteHeader(http.StatusNotFound)
			return true
		})
		if _, err := image.Pull(t.Context(), config(t), ref); !errors.Is(err, image.ErrLayer) ||
			!strings.Contains(err.Error(), elsewhere.URL) || asked.Load() {
			t.Errorf("got %v (asked there: %t), want a refusal that names %s", err, asked.Load(), elsewhere.URL)
		}
	})
	t.Run("a large configuration", func(t *testing.T) {
		im := must.Get(mutate.AppendLayers(imageOf(t)))(t)
		cf := must.Get(im.ConfigFile())(t)
		cf = cf.DeepCopy()
		cf.Author = strings.Repeat("x", 5<<20)
		im = must.Get(mutate.ConfigFile(im, cf))(t)
		expect.Error(t, expect.Err(image.Pull(t.Context(), config(t), serve(t).push(t, "a:1", im))), image.ErrTooLarge)
	})
}

// overwrite replaces a blob of a layout.
func overwrite(t *testing.T, dir, digest string, b []byte) {
	t.Helper()
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "blobs", strings.Replace(digest, ":", "/", 1)), b, 0o600))
}

// TestPullLimitsMessages: no configuration is read and no manifest parsed that is too large or whose size is hidden.
func TestPullLimitsMessages(t *testing.T) {
	const tooMuch = 5 << 20
	for _, manifest := range []string{
		fmt.Sprintf(`{"schemaVersion":2,"config":{"size":-1,"digest":"sha256:%064d"}}`, 1),
		fmt.Sprintf(`{"schemaVersion":2,"config":{"size":%d,"digest":"sha256:%064d"}}`, tooMuch, 1),
		fmt.Sprintf(`{"schemaVersion":2,"config":{"size":2,"digest":"sha256:%064d"}}`, 1) + strings.Repeat(" ", tooMuch),
	} {
		s := serve(t)
		s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
			var err error
			switch {
			case strings.Contains(r.URL.Path, "/manifests/"):
				w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
				_, err = io.WriteString(w, manifest)
			case strings.Contains(r.URL.Path, "/blobs/"):
				_, err = io.Copy(w, strings.NewReader(strings.Repeat("x", tooMuch)))
			default:
				return false
			}
			if err != nil {
				t.Logf("the client has left: %v", err)
			}
			return true
		})
		_, err := image.Pull(t.Context(), config(t), reference(t, s.host+"/a:1"))
		if blobs := s.layers.Load(); !errors.Is(err, image.ErrTooLarge) || blobs > 0 {
			t.Errorf("%.80s: got %v and %d requests for blobs, want ErrTooLarge before the first", manifest, err, blobs)
		}
	}
}

// TestPullShowsTheRegistrysMessage: the error contains what the registry answers.
func TestPullShowsTheRegistrysMessage(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "a:1", simple(t, "1"))
	s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"errors":[{"code":"DENIED","message":"your trial ended yesterday"}]}`)
		return true
	})
	_, err := image.Pull(t.Context(), config(t), ref)
	if err == nil || !strings.Contains(err.Error(), "your trial ended yesterday") ||
		!strings.Contains(err.Error(), ref.String()) {
		t.Errorf("got %v, want the image and the registry's message", err)
	}
}

// TestPullUsesCredentials: a registry gets its own credentials from Docker's configuration, and no others get them.
func TestPullUsesCredentials(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "a:1", simple(t, "1"))
	s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, _ := r.BasicAuth(); user == "builder" && password == "secret" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	write := func(registry string) {
		auth := "YnVpbGRlcjpzZWNyZXQ=" // builder:secret
		text := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, registry, auth)
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600))
	}
	write("registry.example.com")
	expect.Message(t, expect.Err(image.Pull(t.Context(), config(t), ref)), "401", "without credentials")
	write(s.host)
	expect.Error(t, expect.Err(image.Pull(t.Context(), config(t), ref)), nil, "with credentials")
}

// TestPullReadsLayersAgain: a layer is read again if the connection breaks; if it always breaks, that is the error.
func TestPullReadsLayersAgain(t *testing.T) {
	s := serve(t)
	im := imageOf(t, layerOf(t, archive(t, file("a", noise(3<<20)))))
	ref := s.push(t, "a:1", im)
	layers := must.Get(im.Layers())(t)
	var breaks atomic.Int64
	s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digestOf(t, layers[0])) || breaks.Add(-1) < 0 {
			return false
		}
		n, err := layers[0].Size()
		expect.Error(t, err, nil)
		body, err := layers[0].Compressed()
		if err != nil {
			t.Error(err)
			return true
		}
		defer body.Close()
		w.Header().Set("Content-Length", fmt.Sprint(n))
		_, _ = io.CopyN(w, body, n/2)
		panic(http.ErrAbortHandler) // drops the connection
	})
	breaks.Store(2)
	c := config(t)
	c.Limits.Bytes = 4 << 20 // what the failed attempts read does not count
	got, err := image.Pull(t.Context(), c, ref)
	must.Be(t, err == nil, "a connection that breaks twice: %v", err)
	expect.That(t, got.Files == 1 && got.Bytes == 3<<20,
		"got %d files of %d bytes, want 1 of %d", got.Files, got.Bytes, 3<<20)
	breaks.Store(1 << 30)
	if _, err := image.Pull(t.Context(), config(t), ref); err == nil ||
		!strings.Contains(err.Error(), "layer 1 (sha256:") || !strings.Contains(err.Error(), "EOF") {
		t.Errorf("a connection that always breaks: got %v, want the layer and the reason", err)
	}
}

// noise returns n bytes that do not compress.
func noise(n int) string {
	b := make([]byte, n)
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return string(b)
}

// TestLoad: images are loaded from layouts and from the output of docker save.
func TestLoad(t *testing.T) {
	one, two := simple(t, "one"), simple(t, "two")
	saved := func(images map[string]v1.Image) string {
		to := map[name.Tag]v1.Image{}
		for s, im := range images {
			to[must.Get(name.NewTag(s))(t)] = im
		}
		path := filepath.Join(t.TempDir(), "images.tar")
		must.Succeed(t, tarball.MultiWriteToFile(path, to))
		return path
	}
	idOf := func(im v1.Image) string {
		return must.Get(im.ConfigName())(t).String()
	}
	for _, c := range []struct {
		name, path, selector string
		want                 string // the tree, or a part of the error
		digest, reference    string
	}{
		{"a layout", layoutOf(t, one), "", "bin/ bin/tool*=one", digestOf(t, one), ""},
		{"one of a layout", layoutOf(t, one, two), digestOf(t, two), "bin/ bin/tool*=two", digestOf(t, two), ""},
		{"any of a layout", layoutOf(t, one, two), "", "it has 2 images", "", ""},
		{"none of a layout", layoutOf(t, one, two), "three", "it has 0 images named", "", ""},
		{"docker save", saved(map[string]v1.Image{"tools:1": one}), "", "bin/ bin/tool*=one", idOf(one), "tools:1"},
		{
			"one of docker save", saved(map[string]v1.Image{"tools:1": one, "tools:2": two}), "docker.io/library/tools:2",
			"bin/ bin/tool*=two", idOf(two), "docker.io/library/tools:2",
		},
		{"any of docker save", saved(map[string]v1.Image{"tools:1": one, "tools:2": two}), "", "it has 2 images", "", ""},
		{"none of docker save", saved(map[string]v1.Image{"tools:1": one}), "tools:3", "name one of", "", ""},
		{"another archive", filepath.Join(t.TempDir(), "absent"), "", "no such file", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := config(t)
			got, err := image.Load(t.Context(), cfg, c.path, c.selector)
			if c.digest == "" {
				expect.Message(t, err, c.want)
				return
			}
			must.Succeed(t, err)
			if l := list(t, cfg.Store, got.Root); l != c.want || got.Digest != c.digest || got.Reference != c.reference {
				t.Errorf("got %s, %s, %q\nwant %s, %s, %q", l, got.Digest, got.Reference, c.want, c.digest, c.reference)
			}
		})
	}
}

// TestReferencesAreInPlaces: In matches registries and paths that an operator allows.
func TestReferencesAreInPlaces(t *testing.T) {
	for _, c := range []struct {
		ref, place string
		want       bool
	}{
		{"registry.example.com/a/b:1", "registry.example.com", true},
		{"registry.example.com/a/b:1", "registry.example.com/a", true},
		{"registry.example.com/a/b:1", "registry.example.com/a/b", true},
		{"registry.example.com/a/bc:1", "registry.example.com/a/b", false},
		{"registry.example.com/a/b:1", "registry.example.com/b", false},
		{"registry.example.com.evil.org/a:1", "registry.example.com", false},
		{"registry.example.com:5000/a:1", "registry.example.com", false},
		{"registry.example.com:5000/a:1", "registry.example.com:5000", true},
		{"debian", "docker.io", true},
		{"debian", "index.docker.io/library", true},
		{"docker.io/me/tool", "docker.io/library", false},
		{"debian", "", false},
	} {
		expect.Equal(t, reference(t, c.ref).In([]string{c.place}), c.want, "%s in %q", c.ref, c.place)
	}
	for _, bad := range []string{
		"", "UPPER/case", "a b", "x@sha256:12", strings.Repeat("a", 2000), "../etc",
		"registry.example.com/a/../b", "registry.example.com/a//b", "http://a/b",
	} {
		expect.Error(t, expect.Err(image.ParseReference(bad)), cas.ErrInvalid, "ParseReference(%.20q)", bad)
	}
}

// FuzzLayer checks that no layer makes a tree that is not a valid input root.
func FuzzLayer(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		dir("d"), symlink("l", "d"), file("l/a", ""), hardLink("b", "d/a"), file("d/.wh.a", ""),
		file(".wh..wh..opq", ""),
	} {
		h.Uname = ""
		must.Succeed(f, w.WriteHeader(&h))
	}
	f.Add(b.Bytes())
	f.Add([]byte("not an archive"))
	f.Add([]byte{0x1f, 0x8b, 8})
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd})
	f.Fuzz(func(t *testing.T, data []byte) {
		im, err := mutate.AppendLayers(empty.Image, static.NewLayer(data, types.DockerUncompressedLayer))
		if err != nil {
			return // not a layer
		}
		c := image.Config{
			Store: castest.NewMemory(), Function: cas.SHA256, Dir: t.TempDir(),
			Limits: image.Limits{Bytes: 1 << 20, Entries: 1000},
		}
		got, err := load(t, c, im)
		if err == nil {
			list(t, c.Store, got.Root)
		}
	})
}

// TestPullKeepsErrorsOfTheStore: whichever write fails, the pull returns the error of the store, since callers retry
// some of them.
func TestPullKeepsErrorsOfTheStore(t *testing.T) {
	s := serve(t)
	large := strings.Repeat("x", 5<<20) // more than is held in memory, and more than is batched with others
	ref := s.push(t, "tools:1", imageOf(t, layerOf(t, archive(t, file("small", "one"), file("middle", large[:1<<20]), file("large", large)))))
	failures := map[faulty.Op]int{}
	for _, want := range []error{cas.ErrUnavailable, cas.ErrFull, fmt.Errorf("%w (%w)", cas.ErrUpstreamFull, errors.ErrUnsupported)} {
		for _, op := range []faulty.Op{faulty.Put, faulty.PutAll} {
			for nth := 1; ; nth++ {
				store := faulty.New(castest.NewMemory(), nil)
				store.FailNth(op, nth, want)
				c := config(t)
				c.Store = store
				_, err := image.Pull(t.Context(), c, ref)
				if store.Calls(op) < nth {
					must.Succeed(t, err)
					break
				}
				expect.Error(t, err, want, "%s %d", op, nth)
				failures[op]++
			}
		}
	}
	expect.That(t, failures[faulty.Put] > 0 && failures[faulty.PutAll] > 0, "got failures %v, want some of each", failures)
}
