// SPDX-License-Identifier: Apache-2.0

package image_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/authn"
)

// patience bounds waits for something that must happen.
const patience = time.Minute

func open(t *testing.T, change func(*image.LibraryConfig)) *image.Library {
	t.Helper()
	c := image.LibraryConfig{Config: image.Config{Function: cas.SHA256, Dir: t.TempDir()}, Instances: castest.Instances()}
	change(&c)
	l := must.Get(image.OpenLibrary(c))(t)
	t.Cleanup(func() { must.Succeed(t, l.Close()) })
	return l
}

// TestLibraryRemembersImages: a library survives a kill during a write.
func TestLibraryRemembersImages(t *testing.T) {
	s := serve(t)
	im := simple(t, "one")
	ref := s.push(t, "tools:1", im)
	path := filepath.Join(t.TempDir(), image.LibraryFile)
	setup := func(c *image.LibraryConfig) { c.Path, c.Allowed = path, []string{s.host} }
	first := must.Get(open(t, setup).Get(t.Context(), "main", ref, cas.Digest{}))(t)
	// The process is killed while it writes the next record.
	f := must.Get(os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0))(t)
	must.Get(f.WriteString(`01234567 {"reference":"torn`))(t)
	must.Succeed(t, f.Close())

	s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
		w.WriteHeader(http.StatusNotFound)
		return true
	})
	again := open(t, setup)
	all := again.List()
	must.Be(t, len(all) == 1 && fmt.Sprintf("%+v", *all[0]) == fmt.Sprintf("%+v", *first),
		"got %+v, want %+v", all, *first)
	pinned := reference(t, first.Pinned)
	expect.Equal(t, must.Get(again.Get(t.Context(), "main", pinned, cas.Digest{}))(t).Root, first.Root,
		"a known digest")
	if e, err := again.Get(t.Context(), "other", pinned, cas.Digest{}); err == nil {
		t.Errorf("another instance: got %+v, want an error, because its store does not have the image", e)
	}
	must.Succeed(t, again.Remove(all...))
	expect.Slices(t, open(t, setup).List(), nil, "after Remove")
}

// TestPlaces: a place is the host of a registry, or repositories below it.
func TestPlaces(t *testing.T) {
	for place, want := range map[string]bool{
		"docker.io": true, "127.0.0.1:5000": true, "registry.example.com/team/tools": true, "localhost:1/a": true,
		"": false, "https://registry.example.com": false, "registry.example.com/": false, "a b": false, "registry.example.com//x": false,
		"registry.example.com/UPPER": false, "registry.example.com/a:tag": false,
	} {
		expect.Equal(t, image.IsPlace(place), want, "IsPlace(%q)", place)
	}
}

// TestLibraryPullsWhatIsGone: Get pulls an image again whose root is stale.
func TestLibraryPullsWhatIsGone(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "tools:1", simple(t, "one"))
	stores := []*castest.Memory{castest.NewMemory(), castest.NewMemory()}
	l := open(t, func(c *image.LibraryConfig) {
		c.Allowed = []string{s.host}
		c.Instances = func(name string) (*cas.Instance, error) { return &cas.Instance{Name: name, Store: stores[0]}, nil }
	})
	e := must.Get(l.Get(t.Context(), "", ref, cas.Digest{}))(t)
	stores[0] = stores[1] // everything is evicted
	e = must.Get(l.Get(t.Context(), "", ref, e.Root))(t)
	expect.Equal(t, list(t, stores[1], e.Root), "bin/ bin/tool*=one")
}

// TestLibraryAllowsRegistries: only listed registries and images loaded from files are allowed.
func TestLibraryAllowsRegistries(t *testing.T) {
	s := serve(t)
	im := simple(t, "one")
	ref := s.push(t, "team/tools:1", im)
	asked := false
	s.intercept(func(http.ResponseWriter, *http.Request) bool { asked = true; return false })
	l := open(t, func(c *image.LibraryConfig) { c.Allowed = []string{"registry.example.com", s.host + "/other"} })
	pinned := reference(t, ref.Pin(digestOf(t, im)))
	for _, r := range []image.Reference{ref, pinned} {
		if _, err := l.Get(t.Context(), "", r, cas.Digest{}); !errors.Is(err, image.ErrNotAllowed) ||
			!strings.Contains(err.Error(), s.host) || asked {
			t.Errorf("%s: got %v (asked the registry: %t), want ErrNotAllowed without a call", r, err, asked)
		}
	}
	expect.Error(t, expect.Err(l.Load(t.Context(), "", layoutOf(t, im), "", "")), cas.ErrInvalid,
		"a layout without a name")
	loaded := must.Get(l.Load(t.Context(), "", layoutOf(t, im), "", "toolchain:5"))(t)
	if e, err := l.Get(t.Context(), "", pinned, cas.Digest{}); err != nil || e.Root != loaded.Root || asked {
		t.Errorf("the digest of a loaded image: got %+v, %v (asked the registry: %t), want root %s", e, err, asked, loaded.Root)
	}
	expect.Equal(t, must.Get(l.Loaded("", reference(t, "toolchain:5")))(t).Root, loaded.Root,
		"the name of a loaded image")
	expect.Error(t, expect.Err(l.Loaded("", reference(t, "toolchain:6"))), cas.ErrNotFound, "another name")
	hash := strings.TrimPrefix(digestOf(t, im), "sha256:")
	for name, want := range map[string]int{"toolchain:5": 1, hash[:8]: 1, digestOf(t, im): 1, hash[:7]: 0, "toolchain": 0} {
		expect.Equal(t, len(l.Find("", name)), want, "Find(%q): images", name)
	}
}

// TestConcurrentRequestsShareAPull: the pull continues while one of them waits.
func TestConcurrentRequestsShareAPull(t *testing.T) {
	s := serve(t)
	im := simple(t, "one")
	ref := s.push(t, "tools:1", im)
	proceed := make(chan struct{})
	s.intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") && r.Method == http.MethodGet {
			<-proceed
		}
		return false
	})
	l := open(t, func(c *image.LibraryConfig) { c.Allowed = []string{s.host} })
	type answer struct {
		*image.Entry
		error
	}
	const n = 5
	answers := make(chan answer, n)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client is gone")
	for range n - 1 {
		go func() {
			e, err := l.Get(t.Context(), "", ref, cas.Digest{})
			answers <- answer{e, err}
		}()
	}
	left := make(chan error, 1)
	go func() {
		_, err := l.Get(ctx, "", ref, cas.Digest{})
		left <- err
	}()
	must.Hold(t, "all wait for one pull", func() bool {
		p := l.Pulling()
		return len(p) == 1 && p[0].Waiting == n && p[0].Pinned == ref.Pin(digestOf(t, im))
	})
	cancel(gone)
	expect.Error(t, <-left, gone, "the cancelled request (its cause)")
	close(proceed)
	for range n - 1 {
		if a := <-answers; a.error != nil || a.Digest != digestOf(t, im) {
			t.Errorf("another request: got %+v, %v, want the image", a.Entry, a.error)
		}
	}
	expect.Equal(t, s.layers.Load(), 2, "requests for the configuration and the layer (2 in all)")
}

// TestAbandonedPullEnds: a pull ends when its last request is cancelled, and the next request starts another.
func TestAbandonedPullEnds(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "tools:1", simple(t, "one"))
	ended := make(chan struct{}, 1)
	s.intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") && r.Method == http.MethodGet {
			<-r.Context().Done()
			ended <- struct{}{}
		}
		return false
	})
	l := open(t, func(c *image.LibraryConfig) { c.Allowed = []string{s.host} })
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := l.Get(ctx, "", ref, cas.Digest{})
		left <- err
	}()
	must.Hold(t, "the registry is asked for a blob", func() bool { return s.layers.Load() > 0 })
	cancel()
	expect.Error(t, <-left, context.Canceled)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the pull continues although nobody waits for it")
	}
	s.intercept(nil)
	expect.Error(t, expect.Err(l.Get(t.Context(), "", ref, cas.Digest{})), nil, "the next request")
}

// TestPullHasATimeLimit: the error names the limit.
func TestPullHasATimeLimit(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "tools:1", simple(t, "one"))
	s.intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-r.Context().Done()
		}
		return false
	})
	l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.MaxPull = []string{s.host}, 50*time.Millisecond })
	expect.Message(t, expect.Err(l.Get(t.Context(), "", ref, cas.Digest{})), "longer than the limit of 50ms",
		"the limit")
}

// helper is a credential helper that never answers.
type helper chan struct{}

func (h helper) Resolve(authn.Resource) (authn.Authenticator, error) {
	<-h
	return authn.Anonymous, nil
}

// TestCredentialHelperThatHangs: it exceeds the time limit of a pull, and does not hold up Close.
func TestCredentialHelperThatHangs(t *testing.T) {
	s := serve(t)
	im := simple(t, "one")
	ref := reference(t, s.push(t, "tools:1", im).Pin(digestOf(t, im)))
	never := make(helper)
	for _, limit := range []time.Duration{50 * time.Millisecond, time.Hour} {
		l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.Keychain, c.MaxPull = []string{s.host}, never, limit })
		failed := make(chan error, 1)
		go func() {
			_, err := l.Get(t.Context(), "", ref, cas.Digest{})
			failed <- err
		}()
		if limit == time.Hour {
			must.Hold(t, "the pull waits", func() bool { return len(l.Pulling()) == 1 })
			must.Succeed(t, l.Close())
		}
		select {
		case err := <-failed:
			if err == nil || limit < time.Hour && !strings.Contains(err.Error(), "longer than the limit of 50ms") {
				t.Errorf("limit %v: got %v, want an error that states it", limit, err)
			}
		case <-time.After(patience):
			close(never)
			t.Fatalf("limit %v: the pull waits for the helper", limit)
		}
	}
	close(never)
}
