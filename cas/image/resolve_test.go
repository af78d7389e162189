// SPDX-License-Identifier: Apache-2.0

package image_test

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/image"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestFrozenRegistryIsNotAskedAgain: after a query without an answer, further tags of that registry fail at once, and
// those of another registry do not.
func TestFrozenRegistryIsNotAskedAgain(t *testing.T) {
	t.Cleanup(image.SetMaxQuery(50 * time.Millisecond))
	frozen, healthy := serve(t), serve(t)
	ref := healthy.push(t, "tools:v1", simple(t, "one"))
	var asked atomic.Int64
	end := make(chan struct{})
	frozen.intercept(func(http.ResponseWriter, *http.Request) bool {
		asked.Add(1)
		<-end
		return true
	})
	t.Cleanup(func() { close(end) }) // before the server is closed
	l := open(t, func(c *image.LibraryConfig) { c.Allowed = []string{frozen.host, healthy.host} })
	for i := range 5 {
		_, err := l.Pin(t.Context(), "", reference(t, fmt.Sprintf("%s/tools:v%d", frozen.host, i)))
		expect.Message(t, err, "did not answer", "tag %d", i)
		var late interface{ Temporary() bool }
		expect.That(t, errors.As(err, &late) && late.Temporary(), "tag %d: got %v, want a temporary error", i, err)
	}
	// The first query may try HTTPS and HTTP.
	if n := asked.Load(); n > 2 {
		t.Errorf("got %d requests for 5 tags, want those of one query", n)
	}
	image.SetMaxQuery(time.Minute)
	expect.Error(t, expect.Err(l.Pin(t.Context(), "", ref)), nil, "another registry")
}

// TestStalledPullEnds: a pull ends when its registry sends nothing any more, and then keeps no other pull waiting.
func TestStalledPullEnds(t *testing.T) {
	t.Cleanup(image.SetMaxStall(50 * time.Millisecond))
	frozen, healthy := serve(t), serve(t)
	ref := healthy.push(t, "tools:v1", simple(t, "one"))
	stalled := []image.Reference{frozen.push(t, "a:v1", simple(t, "a")), frozen.push(t, "b:v1", simple(t, "b")), frozen.push(t, "c:v1", simple(t, "c"))}
	end := make(chan struct{})
	frozen.intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-end
		}
		return false
	})
	t.Cleanup(func() { close(end) }) // before the server is closed
	l := open(t, func(c *image.LibraryConfig) { c.Allowed = []string{frozen.host, healthy.host} })
	errs := make(chan error)
	for _, r := range stalled {
		go func() {
			_, err := l.Get(t.Context(), "", r, cas.Digest{})
			errs <- err
		}()
	}
	for range stalled {
		if err := <-errs; err == nil || !strings.Contains(err.Error(), "sent nothing for") && !strings.Contains(err.Error(), "did not answer in time") {
			t.Errorf("a registry that sends nothing: got %v", err)
		}
	}
	image.SetMaxStall(time.Minute)
	expect.Error(t, expect.Err(l.Get(t.Context(), "", ref, cas.Digest{})), nil, "another registry")
}

// slowStore is a store whose first Put blocks until proceed is closed.
type slowStore struct {
	cas.Store
	once    *sync.Once
	began   chan struct{} // closed when the first Put begins
	proceed chan struct{}
}

func (s slowStore) Put(ctx context.Context, d cas.Digest, r io.Reader) (err error) {
	s.once.Do(func() {
		close(s.began)
		select {
		case <-s.proceed:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	})
	return cmp.Or(err, s.Store.Put(ctx, d, r))
}

// logged sends log messages to a channel.
type logged struct {
	slog.Handler
	messages chan string
}

func (l logged) Handle(_ context.Context, r slog.Record) error { l.messages <- r.Message; return nil }
func (l logged) WithAttrs([]slog.Attr) slog.Handler            { return l }

// TestSlowStoreIsNoStall: time that a pull spends in the store does not count as silence of the registry.
func TestSlowStoreIsNoStall(t *testing.T) {
	var offset atomic.Int64
	t.Cleanup(image.SetClock(func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }, 10*time.Millisecond))
	s := serve(t)
	ref := s.push(t, "tools:1", imageOf(t, layerOf(t, archive(t, file("large", noise(5<<20))))))
	slow := slowStore{castest.NewMemory(), new(sync.Once), make(chan struct{}), make(chan struct{})}
	log := logged{slog.NewTextHandler(io.Discard, nil), make(chan string, 1000)}
	l := open(t, func(c *image.LibraryConfig) {
		c.Allowed, c.Log = []string{s.host}, slog.New(log)
		c.Instances = func(name string) (*cas.Instance, error) { return &cas.Instance{Name: name, Store: slow}, nil }
	})
	ended := make(chan error, 1)
	go func() {
		_, err := l.Get(t.Context(), "", ref, cas.Digest{})
		ended <- err
	}()
	for reports, began := 0, slow.began; began != nil || reports < 5; {
		select {
		case <-began: // the pull waits only for the store
			reports, began = 0, nil
			offset.Store(int64(time.Hour))
		case m := <-log.messages:
			if m == "still pulling an image" {
				reports++
			}
		case err := <-ended:
			t.Fatalf("the pull ended while the store was busy: %v", err)
		}
	}
	close(slow.proceed)
	for {
		select {
		case <-log.messages: // a message that is not received blocks the pull
		case err := <-ended:
			expect.Error(t, err, nil)
			return
		}
	}
}

// TestLibraryResolvesTags: a tag is resolved again after TagAge, and the entry has the digest.
func TestLibraryResolvesTags(t *testing.T) {
	s := serve(t)
	one, two := simple(t, "one"), simple(t, "two")
	ref := s.push(t, "tools:latest", one)
	l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.TagAge = []string{s.host}, time.Nanosecond })
	get := func(ref image.Reference) *image.Entry {
		t.Helper()
		return must.Get(l.Get(t.Context(), "", ref, cas.Digest{}))(t)
	}
	first := get(ref)
	expect.Equal(t, first.Pinned, ref.Pin(digestOf(t, one)))
	s.push(t, "tools:latest", two)
	second := get(ref)
	if want := ref.Pin(digestOf(t, two)); second.Pinned != want || second.Root == first.Root {
		t.Errorf("after the tag moved: got %s with root %s, want %s and another root", second.Pinned, second.Root, want)
	}
	before := s.layers.Load()
	if get(ref); s.layers.Load() != before {
		t.Error("a known image was pulled again")
	}
}

// TestTagQueriesAreShared: concurrent requests for a tag query the registry once, and a failure is remembered for a
// while.
func TestTagQueriesAreShared(t *testing.T) {
	s := serve(t)
	ref := s.push(t, "team/tools:v1", simple(t, "one"))
	l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.TagAge = []string{s.host}, time.Hour })
	var asked atomic.Int64
	answer := make(chan struct{})
	s.intercept(func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			asked.Add(1)
			<-answer
		}
		return false
	})
	pins := make(chan string)
	for range 5 {
		go func() {
			pinned, err := l.Pin(t.Context(), "", ref)
			expect.Error(t, err, nil)
			pins <- pinned
		}()
	}
	// A cancelled request does not affect the others.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Error(t, expect.Err(l.Pin(ctx, "", ref)), context.Canceled, "cancelled")
	close(answer)
	first := <-pins
	for range 4 {
		if pinned := <-pins; pinned != first || !strings.HasPrefix(pinned, s.host+"/team/tools@sha256:") {
			t.Errorf("got %s and %s", first, pinned)
		}
	}
	absent := reference(t, s.host+"/team/absent:v1")
	for range 3 {
		expect.Message(t, expect.Err(l.Pin(t.Context(), "", absent)), "NAME_UNKNOWN",
			"an absent tag (the registry's message)")
	}
	if got := asked.Load(); got > 3 { // HEAD for the tag, HEAD and GET for the absent one
		t.Errorf("got %d requests, want at most 3", got)
	}
}

// TestTagOfALoadedImageMoves: a tag in a registry that once named the image of a file is asked for like any other.
func TestTagOfALoadedImageMoves(t *testing.T) {
	s := serve(t)
	one, two := simple(t, "one"), simple(t, "two")
	ref := s.push(t, "tools:latest", one)
	l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.TagAge = []string{s.host}, time.Nanosecond })
	must.Get(l.Load(t.Context(), "", layoutOf(t, one), "", "local/tools:1"))(t)
	for _, im := range []v1.Image{one, two} {
		s.push(t, "tools:latest", im)
		if e, err := l.Get(t.Context(), "", ref, cas.Digest{}); err != nil || e.Pinned != ref.Pin(digestOf(t, im)) || e.Loaded {
			t.Errorf("got %+v, %v, want the image %s of the registry", e, err, digestOf(t, im))
		}
	}
}

// TestRefusalsAreNotTemporary: the errors of Pin distinguish an image that the operator or the registry refuses from a
// registry that does not answer.
func TestRefusalsAreNotTemporary(t *testing.T) {
	temporary := func(err error) bool {
		var e interface{ Temporary() bool }
		return errors.As(err, &e) && e.Temporary()
	}
	pin := func(ref image.Reference, allowed ...string) error {
		l := open(t, func(c *image.LibraryConfig) { c.Allowed = allowed })
		return expect.Err(l.Pin(t.Context(), "", ref))
	}
	s := serve(t)
	ref := s.push(t, "tools:v1", simple(t, "one"))
	err := pin(ref)
	expect.That(t, errors.Is(err, image.ErrNotAllowed) && !temporary(err), "a registry that is not allowed: got %v", err)
	err = pin(reference(t, s.host+"/tools:v2"), s.host)
	expect.That(t, err != nil && !temporary(err), "an unknown tag: got %v", err)
	for code, want := range map[int]bool{
		http.StatusUnauthorized: false, http.StatusForbidden: false, http.StatusNotFound: false, http.StatusGone: false,
		http.StatusInsufficientStorage: true, // other 5xx and 429 are retried for seconds
	} {
		for _, part := range []string{"/manifests/", "/v2/"} {
			s.intercept(func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, part) {
					w.WriteHeader(code)
				}
				return strings.Contains(r.URL.Path, part)
			})
			err := pin(ref, s.host)
			expect.That(t, err != nil && temporary(err) == want, "status %d of %s: got %v, want it temporary: %t", code, part, err, want)
		}
	}
	s.intercept(func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("WWW-Authenticate", `Bearer realm="http://["`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	err = pin(ref, s.host)
	expect.That(t, err != nil && !temporary(err), "a malformed realm: got %v", err)
	s.Close()
	err = pin(ref, s.host)
	expect.That(t, temporary(err), "a refused connection: got %v", err)

	web := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return
		}
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/part") {
			_, _ = io.WriteString(w, "{")
			expect.Error(t, http.NewResponseController(w).Flush(), nil)
		}
		panic(http.ErrAbortHandler) // resets the stream
	}))
	web.EnableHTTP2 = true
	web.Config.ErrorLog = log.New(io.Discard, "", 0)
	web.StartTLS()
	t.Cleanup(web.Close)
	for _, row := range []struct {
		host    string // not a local address, for which HTTP is tried, too; the certificate is for example.com
		tag     string
		trusted bool
		text    string
		want    bool
	}{
		{"example.com", "none", true, `/none": stream error`, true}, // of the request
		{"example.com", "part", true, "tools:part: stream error", true},
		{"example.com", "none", false, "unknown authority", false},
		{"registry.test", "none", true, "not registry.test", false},
	} {
		transport := web.Client().Transport.(*http.Transport).Clone()
		t.Cleanup(transport.CloseIdleConnections) // before the server is closed
		transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, web.Listener.Addr().String())
		}
		if !row.trusted {
			transport.TLSClientConfig.RootCAs = x509.NewCertPool()
		}
		l := open(t, func(c *image.LibraryConfig) { c.Allowed, c.Transport = []string{row.host}, transport })
		err := expect.Err(l.Pin(t.Context(), "", reference(t, row.host+"/tools:"+row.tag)))
		expect.Message(t, err, row.text)
		expect.That(t, temporary(err) == row.want, "%s: got %v, want it temporary: %t", row.text, err, row.want)
	}
}
