// SPDX-License-Identifier: Apache-2.0

// Package console serves the web pages of a server. It has no data of its own: it calls the gRPC services of the server
// over a Loopback, with the credentials of the browser, so that a page shows what the same caller could ask a service.
//
// A page is an entry of pages: a function that returns data, and a template. The path of a page with the suffix .json
// returns the same data as JSON; that of / is /index.json. Pages work without JavaScript, read only, and escape
// everything that clients and actions chose.
package console

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"google.golang.org/grpc"
)

// Config configures a Handler. Address, Options and Confinement are required.
type Config struct {
	// Address is that of the server's gRPC services, grpc://HOST:PORT, as commands take it. Options connect to them with
	// the credentials of a request; see Loopback.
	Address string
	Options func(*http.Request) []grpc.DialOption
	// Confinement describes how this machine confines actions.
	Confinement func(*http.Request) *confinement.Report
	// Operator returns an error for requests that may not use the services of operators, whatever their rights are. Nil
	// admits all.
	Operator func(*http.Request) error
	// Changed returns a channel that is closed when the server gets events of the build with that invocation id. Nil means
	// that it gets none.
	Changed func(id string) (<-chan struct{}, error)
	// GateReports is a directory with reports of cloister gate, or "" for none.
	GateReports string
	// Names are the host names under which browsers reach the console, besides loopback and the address of the
	// connection.
	Names []string
	Log   *slog.Logger
}

const (
	// maxRequests limits the requests in progress, maxPage the bytes of a page, and maxLarge the large pages that are made
	// at once.
	maxRequests = 64
	maxPage     = 8 << 20
	maxLarge    = 2
	// requestTime is the time limit of a page. Streams have none, but each of their writes has.
	requestTime = time.Minute
)

// policy is the Content-Security-Policy of every page.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"

// A Handler serves the console. Use New.
type Handler struct {
	cfg   Config
	pages []page
	mux   *http.ServeMux
	slots chan struct{}
	large chan struct{}
	live  live

	profiles chan struct{} // those that are downloaded
}

// New returns a Handler.
func New(c Config) *Handler {
	h := &Handler{
		cfg: c, pages: pages(), mux: http.NewServeMux(), slots: make(chan struct{}, maxRequests), large: make(chan struct{}, maxLarge),
		profiles: make(chan struct{}, maxProfiles),
	}
	if c.GateReports != "" {
		h.pages = append(h.pages, gatePages()...)
	}
	for _, p := range h.pages {
		h.mux.HandleFunc(p.pattern, func(w http.ResponseWriter, r *http.Request) { h.serve(&p, w, r) })
	}
	h.mux.HandleFunc("/events", h.events(feed{"overview.html", false, overviewFeed}))
	h.mux.HandleFunc("/i/{id}/events", h.events(feed{"invocation.html", true, h.invocationFeed}))
	h.mux.HandleFunc("/static/{name}", serveAsset)
	h.mux.HandleFunc("/", h.browserLink)
	return h
}

// Server returns a server of the handler.
func (h *Handler) Server() *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 20 * time.Second, IdleTimeout: 2 * time.Minute,
		WriteTimeout: requestTime, MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(h.cfg.Log.Handler(), slog.LevelDebug),
	}
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	for name, value := range map[string]string{
		"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
		"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
	} {
		header.Set(name, value)
	}
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		header.Set("Allow", "GET, HEAD")
		http.Error(w, "the console is read-only: use GET", http.StatusMethodNotAllowed)
		return
	case !h.named(r):
		http.Error(w, "unknown host name: open the console at the address that serve prints", http.StatusMisdirectedRequest)
		return
	case foreign(r):
		http.Error(w, "another site's page requests this: open it yourself", http.StatusForbidden)
		return
	case len(r.Header["Authorization"]) > 1:
		http.Error(w, "several Authorization headers", http.StatusBadRequest)
		return
	}
	select {
	case h.slots <- struct{}{}:
		defer func() { <-h.slots }()
	default:
		http.Error(w, "too many requests are in progress", http.StatusServiceUnavailable)
		return
	}
	if path, ok := strings.CutSuffix(r.URL.Path, ".json"); ok {
		if r = r.Clone(context.WithValue(r.Context(), jsonKey{}, true)); path == "/index" {
			path = "/"
		}
		r.URL.Path, r.URL.RawPath = path, strings.TrimSuffix(r.URL.RawPath, ".json")
	}
	h.mux.ServeHTTP(w, r)
}

// named reports whether a request names this console. Another name may be that of a hostile page whose author made it
// resolve to this address.
func (h *Handler) named(r *http.Request) bool {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if host == "localhost" || slices.Contains(h.cfg.Names, host) {
		return true
	}
	ip := net.ParseIP(host)
	local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ip != nil && (ip.IsLoopback() || local != nil && ip.Equal(local.IP))
}

// foreign reports whether a page of another site requests r, other than by a link that the user follows. It could not
// read the answer, but could keep the server busy and learn from the time that it takes.
func foreign(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site")
	link := r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	return (site == "cross-site" || site == "same-site") && !link
}

// A buffer holds a page of limited size.
type buffer struct{ bytes.Buffer }

var errTooLarge = errors.New("the page is too large: narrow the filter")

// Write implements io.Writer.
func (b *buffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxPage {
		return 0, errTooLarge
	}
	return b.Buffer.Write(p)
}
