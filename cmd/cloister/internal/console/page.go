// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro/pagestyle"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A page is what the console serves at the paths of a pattern.
type page struct {
	pattern  string // of http.ServeMux
	nav      string // the name in the navigation, "" for none
	template string // a file in pages/ that defines title and main
	large    bool   // data and rendering may take hundreds of megabytes
	// data returns what the template shows and .json returns. Instead, an http.Handler is served as it is: it must treat
	// what it serves as hostile.
	data func(*request) (any, error)
}

// pages returns the pages of the console, in the order of the navigation.
func pages() []page {
	return append([]page{
		{"/{$}", "overview", "overview.html", false, overview},
		{"/actions", "actions", "actions.html", false, listActions},
		{"/workers", "workers", "workers.html", false, listWorkers},
		{"/cache", "cache", "cache.html", false, showCache},
		{"/check", "check", "check.html", false, showCheck},
		{"/i/{id}", "", "invocation.html", true, invocation},
		{"/i/{id}/profile.gz", "", "", true, buildProfile},
		{"/a/{name}", "", "action.html", true, showAction},
		{"/search", "", "", false, search},
	}, viewers()...)
}

// A request is a request for a page.
type request struct {
	*http.Request
	// from calls the server as the caller of this request. Without the parameter instance, it looks names up in all
	// instances.
	from *client.Server
	h    *Handler
}

// request returns r with access to the server.
func (h *Handler) request(r *http.Request) *request {
	q := r.URL.Query()
	from := &client.Server{Address: h.cfg.Address, Options: h.cfg.Options(r), Instance: q.Get("instance"), Anywhere: !q.Has("instance")}
	return &request{Request: r, from: from, h: h}
}

// admit refuses callers whom the server does not know, whatever they request.
func (r *request) admit() error {
	conn, _, err := r.from.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = repb.NewCapabilitiesClient(conn).GetCapabilities(r.Context(), &repb.GetCapabilitiesRequest{})
	if code := status.Code(err); code == codes.Unauthenticated || code == codes.PermissionDenied {
		return client.Reason(err)
	}
	return nil // the page reports other errors
}

// operator refuses callers who may not use the services of operators.
func (r *request) operator() error {
	if r.h.cfg.Operator == nil {
		return nil
	}
	return r.h.cfg.Operator(r.Request)
}

// number returns a parameter that is a number from 1 to limit, or standard without it.
func (r *request) number(name string, standard, limit int) int {
	var n int
	if _, err := fmt.Sscanf(r.FormValue(name), "%d", &n); err != nil || n < 1 {
		return standard
	}
	return min(n, limit)
}

// digestName returns HASH/SIZE for a path's HASH-SIZE, and other names as they are.
func digestName(name string) string { return dashed.ReplaceAllString(name, "$1/$2") }

var dashed = regexp.MustCompile(`^((?:[a-z0-9]+:)?[0-9a-f]+)-([0-9]+)$`)

// A view is what the layout shows.
type view struct {
	Nav     []navLink
	JSON    string // URL of the data
	Version string
	Data    any
}

// A navLink leads to a page.
type navLink struct {
	Name, Path string
	Current    bool
}

func (h *Handler) serve(p *page, w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), requestTime)
	defer cancel()
	q := h.request(r.WithContext(ctx))
	kind, out, raw, err := h.load(p, q)
	switch {
	case err != nil:
		h.fail(w, r, err)
	case raw != nil:
		raw.ServeHTTP(w, r)
	default:
		h.write(w, r, http.StatusOK, kind, out)
	}
}

// load makes a page for callers whom the server knows: a text of a kind, or a handler.
func (h *Handler) load(p *page, q *request) (kind string, out *buffer, raw http.Handler, err error) {
	if err := q.admit(); err != nil {
		return "", nil, nil, err
	}
	if p.large {
		leave, err := h.enterLarge(q.Context())
		if err != nil {
			return "", nil, nil, err
		}
		defer leave()
	}
	data, err := p.data(q)
	if err != nil {
		return "", nil, nil, err
	}
	if raw, ok := data.(http.Handler); ok {
		return "", nil, raw, nil
	}
	kind, out, err = h.render(q.Request, p.pattern, p.template, data)
	return kind, out, nil, err
}

// enterLarge waits until another large page may be made. The caller calls leave once it is rendered.
func (h *Handler) enterLarge(ctx context.Context) (leave func(), err error) {
	select {
	case h.large <- struct{}{}:
		return func() { <-h.large }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// jsonKey is the context key of requests for JSON.
type jsonKey struct{}

// render renders data as JSON or with a template.
func (h *Handler) render(r *http.Request, pattern, name string, data any) (kind string, out *buffer, err error) {
	out = &buffer{}
	if r.Context().Value(jsonKey{}) != nil {
		return "application/json", out, render.JSON(out, data)
	}
	v := view{Version: buildinfo.Version, Data: data}
	for _, p := range h.pages {
		if p.nav != "" {
			v.Nav = append(v.Nav, navLink{p.nav, strings.TrimSuffix(p.pattern, "{$}"), p.pattern == pattern})
		}
	}
	u := *r.URL
	u.Path = cmp.Or(strings.TrimSuffix(u.Path, "/"), "/index") + ".json"
	v.JSON = u.RequestURI()
	return "text/html; charset=utf-8", out, templates()[name].ExecuteTemplate(out, "layout.html", &v)
}

// write writes a page.
func (h *Handler) write(w http.ResponseWriter, r *http.Request, code int, kind string, out *buffer) {
	w.Header().Set("Content-Type", kind)
	w.WriteHeader(code)
	if _, err := out.WriteTo(w); err != nil {
		h.cfg.Log.Debug("cannot write a page", "path", r.URL.Path, "err", err)
	}
}

var errNoPage = exit.New(exit.Absent, errors.New("the console has no such page"))

// A failure is the data of a page that could not be made.
type failure struct {
	Status int    `json:"status"`
	Error  string `json:"error"`
}

// fail writes why a page could not be made.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	f := &failure{statusOf(err), printable.Head(err.Error(), 2000)}
	if f.Status == http.StatusUnauthorized {
		// Browsers ask for a password, which is the token.
		w.Header().Set("WWW-Authenticate", `Basic realm="cloister: the password is the token", charset="UTF-8"`)
	}
	kind, out, err := h.render(r, "", "error.html", f)
	if err != nil {
		h.cfg.Log.Error("cannot make the error page", "err", err)
		http.Error(w, f.Error, f.Status)
		return
	}
	h.write(w, r, f.Status, kind, out)
}

// statusOf returns the HTTP status for an error.
func statusOf(err error) int {
	var e *exit.Error
	errors.As(err, &e)
	switch code := status.Code(err); {
	case code == codes.Unauthenticated:
		return http.StatusUnauthorized
	case code == codes.PermissionDenied, errors.Is(err, cas.ErrDenied), errors.Is(err, os.ErrPermission):
		return http.StatusForbidden
	case errors.Is(err, cas.ErrNotFound), e != nil && e.Code == exit.Absent:
		return http.StatusNotFound
	case errors.Is(err, cas.ErrInvalid), e != nil && e.Code == exit.Usage:
		return http.StatusBadRequest
	case errors.Is(err, cas.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), e != nil && e.Code == exit.Unreachable:
		return http.StatusServiceUnavailable
	case e != nil:
		return http.StatusConflict
	}
	return http.StatusInternalServerError
}

//go:embed pages
var files embed.FS

// templates returns the pages by file. Each has the layout and the parts that several pages use. They are parsed when
// the first page is shown; at program start, that would take a sixth of the CPU time of every command.
var templates = sync.OnceValue(parse)

func parse() map[string]*template.Template {
	shared := template.Must(template.New("").Funcs(functions).ParseFS(files, "pages/layout.html", "pages/parts.html", "pages/build.html"))
	all := map[string]*template.Template{"error.html": nil}
	for _, p := range append(pages(), gatePages()...) {
		if p.template != "" {
			all[p.template] = nil
		}
	}
	for name := range all {
		all[name] = template.Must(template.Must(shared.Clone()).ParseFS(files, "pages/"+name))
	}
	return all
}

// functions are those of templates. Texts of clients and actions go through text or quote, which make them printable.
var functions = template.FuncMap{
	"age":    render.Age,
	"bytes":  func(n int64) string { return sandbox.Bytes(n) },
	"text":   func(s string) string { return printable.Head(s, 2000) },
	"quote":  render.Quote,
	"join":   strings.Join,
	"count":  func(n int, noun string) string { return render.Count(n, noun) },
	"short":  short,
	"action": ActionPath,
	"blob":   func(digest, instance string) string { return link("/cas/", digest, instance) },
	"seconds": func(s float64) string {
		d := time.Duration(s * float64(time.Second))
		if d < 10*time.Millisecond {
			return d.Round(10 * time.Microsecond).String()
		}
		return d.Round(time.Millisecond).String()
	},
	"path":    url.PathEscape,
	"command": render.QuoteScript,
}

// short returns the first digits of a digest or an id, after its digest function.
func short(name string) string {
	at := strings.IndexByte(name, ':') + 1
	return printable.Head(name[:min(len(name), at+12)], 40)
}

// ActionPath returns the path and the query of an action's page.
func ActionPath(digest, instance string) string { return link("/a/", digest, instance) }

// link returns the URL of a digest HASH/SIZE below a path.
func link(path, digest, instance string) string {
	u := url.URL{Path: path + strings.Replace(digest, "/", "-", 1)}
	if instance != "" {
		u.RawQuery = url.Values{"instance": {instance}}.Encode()
	}
	return u.String()
}

// serveAsset serves the style sheet and the script.
func serveAsset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	kinds := map[string]string{"console.css": "text/css; charset=utf-8", "console.js": "text/javascript; charset=utf-8"}
	text, err := files.ReadFile("pages/" + name)
	if kinds[name] == "" || err != nil {
		http.NotFound(w, r)
		return
	}
	if name == "console.css" {
		text = slices.Concat([]byte(pagestyle.CSS), text)
	}
	w.Header().Set("Content-Type", kinds[name])
	w.Header().Set("Cache-Control", "max-age=300")
	if _, err := w.Write(text); err != nil {
		return // the browser left
	}
}
