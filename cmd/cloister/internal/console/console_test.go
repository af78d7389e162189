// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

const (
	build = "5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f"
	evil  = `<script>alert(1)</script>"'` + "\x1b[31m"
)

// A site is a console over a server with a store and a history, which have one failed action with hostile names.
type site struct {
	*httptest.Server
	action string // HASH-SIZE
	log    *history.Log
	live   *live
	server client.Server // behind the console
}

// open starts a site. With callers, the text of a callers file, it has access rules.
func open(t *testing.T, callers string) *site {
	t.Helper()
	dir := t.TempDir()
	store := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 1 << 30}))(t)
	t.Cleanup(func() { store.Close() })
	control := must.Get(diskctl.Serve(filepath.Join(dir, "store"), store, nil))(t)
	t.Cleanup(func() { control.Close() })
	l := must.Get(history.Open(history.Config{Dir: filepath.Join(dir, "history")}))(t)
	t.Cleanup(func() { l.Close() })
	c := service.Config{Worker: worker.Config{Name: "head", Instances: store.Instance}, History: l}
	builds := must.Get(buildevents.Open(buildevents.Config{Dir: filepath.Join(dir, "builds"), MaxBytes: 1 << 20}))(t)
	var readers buildevents.Callers
	var options []grpc.ServerOption
	address := "grpc://127.0.0.1:1"
	if callers != "" {
		address = "grpcs://127.0.0.1:1" // as of a server with TLS
		file := filepath.Join(dir, "auth.yaml")
		must.Succeed(t, os.WriteFile(file, []byte(callers), 0o600))
		live := must.Get(access.NewLive(file, nil, slog.New(slog.DiscardHandler)))(t)
		t.Cleanup(live.Close)
		c.Access, readers, options = live, live, live.Options()
	}
	server := must.Get(service.NewServer(t.Context(), c))(t)
	t.Cleanup(func() { server.Close() })
	loop := NewLoopback()
	g := grpc.NewServer(slices.Concat(casserver.ServerOptions(nil), []grpc.ServerOption{casserver.Codec(), loop.Credentials()}, options)...)
	must.Succeed(t, server.Register(g))
	control.Register(g)
	builds.Register(g, readers)
	go g.Serve(loop)
	t.Cleanup(g.Stop)
	h := New(Config{
		Address: address, Options: loop.Options, Names: []string{"console.example.com"}, Log: slog.New(slog.DiscardHandler),
		Confinement: func(*http.Request) *confinement.Report { return &confinement.Report{Tier: "full"} }, Changed: builds.Changed,
	})
	s := &site{Server: httptest.NewServer(h), log: l, live: &h.live, server: client.Server{Address: address, Options: loop.Options(&http.Request{})}}
	t.Cleanup(s.Close)
	s.action = fail(t, must.Get(store.Instance(""))(t), l)
	return s
}

// fail stores an action with hostile names and its failure, and returns HASH-SIZE.
func fail(t *testing.T, in *cas.Instance, l *history.Log) string {
	t.Helper()
	put := func(d cas.Digest, err error) *repb.Digest {
		t.Helper()
		must.Succeed(t, err)
		return d.Proto()
	}
	root := put(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.Directory{}))
	command := put(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.Command{
		Arguments: []string{"cc", evil}, EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A", Value: evil}},
	}))
	action := must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.Action{CommandDigest: command, InputRootDigest: root}))(t)
	output := cas.SHA256.Sum([]byte("x"))
	response := must.Get(cas.PutProto(t.Context(), in.Store, cas.SHA256, &repb.ExecuteResponse{
		Message: "cloister: exit code 3\n" + evil,
		Result: &repb.ActionResult{
			ExitCode: 3, StdoutRaw: []byte("plain \x1b[1m" + evil + "\x1b]0;title\x07 \x00\u202e end"),
			OutputFiles: []*repb.OutputFile{{Path: evil, Digest: output.Proto()}},
		},
	}))(t)
	l.Add(history.Entry{
		How: history.Executed, Action: action.String(), Invocation: build, Target: "//" + evil, Mnemonic: evil, Exit: 3,
		Worker: evil, Ran: time.Second, Result: "r", Response: response.String(), Code: int32(codes.OK),
	})
	return strings.Replace(action.String(), "/", "-", 1)
}

// An answer is a response without its body.
type answer struct {
	StatusCode int
	Status     string
	Header     http.Header
}

// get returns the response to a request that edit may change, and its body.
func (s *site) get(t *testing.T, path string, edit func(*http.Request)) (*answer, string) {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path, nil))(t)
	if edit != nil {
		edit(r)
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response := must.Get(client.Do(r))(t) //nolint:bodyclose // it is closed below
	defer response.Body.Close()
	return &answer{response.StatusCode, response.Status, response.Header}, string(must.Get(io.ReadAll(response.Body))(t))
}

// paths returns a path of each page.
func (s *site) paths() []string {
	return []string{
		"/", "/actions", "/actions?failed=1&target=//*", "/workers", "/cache", "/check", "/i/" + build, "/i/" + build[:8],
		"/a/" + s.action, "/a/" + s.action[:12], "/a/%5E1",
	}
}

// TestPages: every page has the headers, no inline script or style, escaped text of clients, and its data as JSON.
func TestPages(t *testing.T) {
	s := open(t, "")
	for _, path := range s.paths() {
		r, body := s.get(t, path, nil)
		must.Be(t, r.StatusCode == http.StatusOK, "%s: %s: %s", path, r.Status, body)
		for name, want := range map[string]string{
			"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
			"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
			"Content-Type": "text/html; charset=utf-8",
		} {
			expect.Equal(t, r.Header.Get(name), want, path, name)
		}
		for _, text := range []string{"<script>", "<style", " style=", "onclick", "\x1b", "\u202e"} {
			expect.That(t, !strings.Contains(body, text), "%s has %q", path, text)
		}
		at, query, _ := strings.Cut(path, "?")
		if at == "/" {
			at = "/index"
		}
		r, body = s.get(t, at+".json?"+query, nil)
		expect.That(t, r.StatusCode == http.StatusOK && r.Header.Get("Content-Type") == "application/json" && json.Valid([]byte(body)),
			"%s as JSON: %s, %q, %s", path, r.Status, r.Header.Get("Content-Type"), body)
	}
	var a actionData
	_, body := s.get(t, "/a/"+s.action+".json", nil)
	must.Succeed(t, json.Unmarshal([]byte(body), &a))
	expect.That(t, a.Failed && a.Stdout != nil && strings.HasPrefix(a.Stdout.Text, "plain <script>") && strings.Contains(a.Rerun, "cloister run --action"),
		"got %+v", a)
	_, body = s.get(t, "/a/"+s.action, nil)
	expect.That(t, strings.Contains(body, "&lt;script&gt;") && strings.Contains(body, "Failed: exit code 3"), "got %s", body)
	var i invocationData
	_, body = s.get(t, "/i/"+build+".json", nil)
	must.Succeed(t, json.Unmarshal([]byte(body), &i))
	expect.That(t, i.Executed == 1 && i.Failed == 1 && len(i.Timeline.Bars) == 1 && len(i.Failures) == 1, "got %s", body)
}

// TestBuildProfile downloads the trace of a build without events, which has the server's part.
func TestBuildProfile(t *testing.T) {
	s := open(t, "")
	_, page := s.get(t, "/i/"+build, nil)
	expect.Text(t, page, `href="/i/`+build+`/profile.gz"`)
	r, body := s.get(t, "/i/"+build[:8]+"/profile.gz", nil)
	must.Be(t, r.StatusCode == http.StatusOK, "%s: %s", r.Status, body)
	expect.Equal(t, r.Header.Get("Content-Disposition"), "attachment; filename="+build+".profile.gz")
	expect.Equal(t, r.Header.Get("Content-Security-Policy"), "default-src 'none'; sandbox")
	var trace struct {
		TraceEvents []struct{ Name, Cat string }
		Cloister    struct{ Problem string }
	}
	must.Succeed(t, json.NewDecoder(must.Get(gzip.NewReader(strings.NewReader(body)))(t)).Decode(&trace))
	expect.Text(t, trace.Cloister.Problem, "pass --bes_backend")
	expect.That(t, slices.ContainsFunc(trace.TraceEvents, func(e struct{ Name, Cat string }) bool {
		return e.Cat == "action" && strings.Contains(e.Name, "<script>")
	}), "got %+v", trace)
	r, _ = s.get(t, "/i/a0b1c2d3-e4f5-4607-8819-2a3b4c5d6e7f/profile.gz", nil)
	expect.Equal(t, r.StatusCode, http.StatusNotFound, "unknown build")
	h := s.Config.Handler.(*Handler)
	expect.Equal(t, len(h.profiles), 0, "downloads that have ended")
	for range maxProfiles {
		h.profiles <- struct{}{}
	}
	r, _ = s.get(t, "/i/"+build+"/profile.gz", nil)
	expect.Equal(t, r.StatusCode, http.StatusServiceUnavailable, "one download too many")
	expect.Equal(t, len(h.profiles), maxProfiles, "downloads after that")
}

// TestRefusals: other methods, foreign names and unknown paths are refused.
func TestRefusals(t *testing.T) {
	s := open(t, "")
	host := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	fetched := func(site, mode, dest string) func(*http.Request) {
		return func(r *http.Request) {
			r.Header.Set("Sec-Fetch-Site", site)
			r.Header.Set("Sec-Fetch-Mode", mode)
			r.Header.Set("Sec-Fetch-Dest", dest)
		}
	}
	for name, c := range map[string]struct {
		path string
		edit func(*http.Request)
		want int
	}{
		"POST":            {"/", func(r *http.Request) { r.Method = http.MethodPost }, http.StatusMethodNotAllowed},
		"OPTIONS":         {"/", func(r *http.Request) { r.Method = http.MethodOptions }, http.StatusMethodNotAllowed},
		"HEAD":            {"/", func(r *http.Request) { r.Method = http.MethodHead }, http.StatusOK},
		"HEAD of a feed":  {"/events", func(r *http.Request) { r.Method = http.MethodHead }, http.StatusOK},
		"a foreign name":  {"/", host("evil.example"), http.StatusMisdirectedRequest},
		"a similar name":  {"/", host("localhost.evil.example"), http.StatusMisdirectedRequest},
		"another address": {"/", host("192.0.2.1:80"), http.StatusMisdirectedRequest},
		"localhost":       {"/", host("LOCALHOST.:1"), http.StatusOK},
		"IPv6":            {"/", host("[::1]:80"), http.StatusOK},
		"its name":        {"/", host("console.example.com"), http.StatusOK},
		"a foreign image": {"/", fetched("cross-site", "no-cors", "image"), http.StatusForbidden},
		"a foreign frame": {"/", fetched("same-site", "navigate", "iframe"), http.StatusForbidden},
		"a foreign link":  {"/", fetched("cross-site", "navigate", "document"), http.StatusOK},
		"its own script":  {"/", fetched("same-origin", "cors", "empty"), http.StatusOK},
		"no page":         {"/nope", nil, http.StatusNotFound},
		"no asset":        {"/static/layout.html", nil, http.StatusNotFound},
		"no action":       {"/a/" + strings.Repeat("0", 64) + "-1", nil, http.StatusNotFound},
		"no build":        {"/i/nope", nil, http.StatusNotFound},
		"no digest":       {"/a/nope", nil, http.StatusBadRequest},
		"a style":         {"/static/console.css", nil, http.StatusOK},
		"a script":        {"/static/console.js", nil, http.StatusOK},
	} {
		if r, body := s.get(t, c.path, c.edit); r.StatusCode != c.want || r.Header.Get("Content-Security-Policy") != policy {
			t.Errorf("%s: %s, want %d: %s", name, r.Status, c.want, body)
		}
	}
}

// TestSearch: a text leads to the page of what it names.
func TestSearch(t *testing.T) {
	s := open(t, "")
	for text, want := range map[string]string{
		"%5E1": "/a/%5E1", build: "/i/" + build, s.action: "/a/" + s.action, "//a/...": "/actions?target=%2F%2Fa%2F...",
		"CppCompile": "/actions?mnemonic=CppCompile", "https://evil.example/": "/actions?target=https%3A%2F%2Fevil.example%2F",
		"": "/actions",
	} {
		r, _ := s.get(t, "/search?q="+text, nil)
		expect.That(t, r.StatusCode == http.StatusSeeOther && r.Header.Get("Location") == want,
			"%q leads to %q, want %q", text, r.Header.Get("Location"), want)
	}
}

// TestRights: a request has the rights of its token, as a bearer token or a password, and none without one.
func TestRights(t *testing.T) {
	hash := func(token string) string { return strings.TrimPrefix(cas.SHA256.Sum([]byte(token)).Hash(), "sha256:") }
	s := open(t, fmt.Sprintf("version: 1\ncallers:\n- {name: all, token_sha256: %s, rights: [read, execute, operate]}\n"+
		"- {name: other, token_sha256: %s, rights: [{read: team}]}\n", hash("secret"), hash("foreign")))
	bearer := func(token string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
	}
	password := func(r *http.Request) { r.SetBasicAuth("anyone", "secret") }
	for _, path := range append(s.paths(), "/events", "/i/"+build+"/events", "/i/"+build+"/profile.gz") {
		for name, edit := range map[string]func(*http.Request){"no token": nil, "a wrong token": bearer("wrong"), "two tokens": func(r *http.Request) {
			r.Header["Authorization"] = []string{"Bearer secret", "Bearer secret"}
		}} {
			r, body := s.get(t, path, edit)
			expect.That(t, r.StatusCode == http.StatusUnauthorized || name == "two tokens" && r.StatusCode == http.StatusBadRequest,
				"%s with %s: %s", path, name, r.Status)
			expect.That(t, !strings.Contains(body, "script&gt;"), "%s with %s shows the action", path, name)
		}
		if strings.HasSuffix(path, "/events") {
			continue
		}
		for _, edit := range []func(*http.Request){bearer("secret"), password} {
			r, body := s.get(t, path, edit)
			expect.That(t, r.StatusCode == http.StatusOK, "%s with a token: %s: %s", path, r.Status, body)
		}
		r, body := s.get(t, path, bearer("foreign"))
		expect.That(t, !strings.Contains(body, "script&gt;"), "%s: %s shows the action of another instance", path, r.Status)
	}
	r, _ := s.get(t, "/cache", bearer("foreign"))
	expect.Equal(t, r.StatusCode, http.StatusForbidden, "/cache without the right operate")
}

// TestOperators: what is for operators is hidden from those whom the server does not take for one.
func TestOperators(t *testing.T) {
	s := open(t, "")
	s.Config.Handler.(*Handler).cfg.Operator = func(*http.Request) error { return cas.ErrDenied }
	for path, want := range map[string]int{"/": http.StatusOK, "/cache": http.StatusForbidden, "/audit": http.StatusForbidden} {
		r, body := s.get(t, path, nil)
		expect.That(t, r.StatusCode == want && !strings.Contains(body, "Store:"), "%s: %s: %s", path, r.Status, body)
	}
}

// TestLargePagesWait: large pages are made one after another, and others meanwhile.
func TestLargePagesWait(t *testing.T) {
	s := open(t, "")
	h := s.Config.Handler.(*Handler)
	for _, path := range []string{"/i/" + build, "/a/" + s.action, "/a/" + s.action + "/inputs", "/cas/" + s.action} {
		for range maxLarge {
			h.large <- struct{}{}
		}
		made := make(chan int, 1)
		go func() {
			r, _ := s.get(t, path, nil)
			made <- r.StatusCode
		}()
		for range 10 {
			r, body := s.get(t, "/workers", nil)
			expect.That(t, r.StatusCode == http.StatusOK, "a small page: %s: %s", r.Status, body)
		}
		select {
		case <-made:
			t.Errorf("%s did not wait for other large pages", path)
			<-h.large
		default:
			<-h.large
			expect.Equal(t, <-made, http.StatusOK, path)
		}
		for range maxLarge - 1 {
			<-h.large
		}
	}
	expect.Equal(t, len(h.large), 0, "large pages that are being made")
}

// TestEvents: a viewer gets snapshots until it leaves, and the number of viewers is limited.
func TestEvents(t *testing.T) {
	s := open(t, "")
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/events", nil))(t)
	var feeds []io.Reader
	for range maxViewers {
		v := must.Get(s.Client().Do(r))(t) //nolint:bodyclose // it is closed below
		defer v.Body.Close()
		feeds = append(feeds, v.Body)
	}
	refused, _ := s.get(t, "/events", nil)
	expect.Equal(t, refused.StatusCode, http.StatusServiceUnavailable, "one viewer too many")
	lines := bufio.NewScanner(feeds[0])
	for seen := 0; seen < 2 && lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			var html string
			must.Succeed(t, json.Unmarshal([]byte(text), &html))
			must.Be(t, strings.Contains(html, "all slots are idle"), "got %s", html)
			seen++
		}
	}
	must.Succeed(t, lines.Err())
}
