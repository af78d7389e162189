// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/console"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
)

// defaultWeb is where serve serves the console by default.
const defaultWeb = "127.0.0.1:8981"

// webConfig is the flag of the web console.
type webConfig struct {
	address string
	chosen  bool   // on the command line
	reports string // directory with reports of the gate
}

// Register adds the flag.
func (w *webConfig) Register(f *pflag.FlagSet) {
	f.StringVar(&w.address, "web", defaultWeb, "address and port of the web console; an empty value disables it")
	flags.AllowEmpty(f, "web")
	f.StringVar(&w.reports, "gate-reports", "", "directory with the reports of cloister gate (its --out), for the web console to show")
}

// check validates the flag.
func (w *webConfig) check(cmd *cobra.Command, a *Auth) error {
	w.chosen = cmd.Flags().Changed("web")
	if w.reports != "" {
		if st, err := os.Stat(w.reports); err != nil || !st.IsDir() {
			return fmt.Errorf("--gate-reports %s: %w", w.reports, cmp.Or(err, errors.New("not a directory")))
		}
		if w.address == "" {
			return errors.New("--gate-reports needs the web console: omit --web \"\"")
		}
	}
	host, _, err := net.SplitHostPort(w.address)
	ip := net.ParseIP(host)
	if w.address == "" || err != nil || host == "localhost" || ip != nil && ip.IsLoopback() { // Listen explains a mistake
		return nil
	}
	if a.cert == "" || a.auth+a.clientCA == "" {
		return fmt.Errorf("--web %s: beyond loopback, the console needs --tls-cert, and --auth or --tls-client-ca", w.address)
	}
	return nil
}

// names returns the host names under which browsers reach the console, other than loopback.
func (w *webConfig) names() []string {
	host, _, _ := net.SplitHostPort(w.address) // Listen checked it
	own, _ := os.Hostname()                    // "" admits nothing
	return slices.DeleteFunc([]string{strings.ToLower(host), strings.ToLower(own)}, func(name string) bool { return name == "" })
}

// A webPort is the listener of the console and the servers behind it.
type webPort struct {
	url      string
	listener net.Listener
	server   *http.Server
	loop     *console.Loopback
	grpc     *grpc.Server // behind the console
}

// listenWeb opens the port of the console. If the default port is not available, there is no console.
func (s *server) listenWeb() error {
	if s.Web.address == "" {
		return nil
	}
	listener, err := node.Listen(s.Web.address, "--web")
	if err != nil && !s.Web.chosen {
		s.log.Warn("no web console: its default port is not available; choose another one with --web", "err", err)
		return nil
	} else if err != nil {
		return err
	}
	scheme := "http"
	if s.Auth.config != nil {
		config := s.Auth.config.Clone()
		config.NextProtos = []string{"http/1.1"} // pages need no more
		listener = tls.NewListener(listener, config)
		scheme = "https"
	}
	s.web = &webPort{url: scheme + "://" + reachable(listener.Addr(), "127.0.0.1"), listener: listener, loop: console.NewLoopback()}
	s.onClose(func() { listener.Close() })
	return nil
}

// openConsole makes the console, and behind it a gRPC server with the services and access rules of clients and
// operators. Other callers cannot reach that one.
func (s *server) openConsole() error {
	w := s.web
	if w == nil {
		return nil
	}
	w.grpc = grpc.NewServer(slices.Concat(casserver.ServerOptions(s.log), []grpc.ServerOption{casserver.Codec(), w.loop.Credentials()},
		s.Auth.checks(), s.limits.Options())...)
	s.onClose(w.grpc.Stop)
	if err := s.services.Register(w.grpc); err != nil {
		return err
	}
	s.registerBuilds(w.grpc)
	s.node.RegisterOperators(w.grpc)
	if err := access.Check(w.grpc.GetServiceInfo()); err != nil {
		return err
	}
	c := console.Config{
		Address: s.Auth.scheme() + "://" + reachable(s.listener.Addr(), "127.0.0.1"), Options: w.loop.Options,
		Confinement: s.confinement(), Operator: s.operator, Names: s.Web.names(), Log: s.log,
		GateReports: s.Web.reports,
	}
	if s.builds != nil {
		c.Changed = s.builds.Changed
	}
	w.server = console.New(c).Server()
	s.onClose(func() { w.server.Close() })
	return nil
}

// reportAge is the age of the description of the machine from which /check makes another one.
const reportAge = time.Minute

// confinement returns a function that describes how this machine confines actions.
func (s *server) confinement() func(*http.Request) *confinement.Report {
	read := recent(reportAge, func() *confinement.Report {
		r, err := confinement.NewReport(s.node.Background, s.services.Features(), !s.Head)
		if err != nil && !errors.Is(err, context.Canceled) {
			s.log.Warn("the toolchain of this host cannot be read", "err", err)
		}
		return r
	})
	return func(*http.Request) *confinement.Report { return read() }
}

// recent returns a function that returns what read returned, and calls it again when that is older than age.
func recent[T any](age time.Duration, read func() T) func() T {
	var mu sync.Mutex
	var at time.Time
	var value T
	return func() T {
		mu.Lock()
		defer mu.Unlock()
		if at.IsZero() || time.Since(at) >= age {
			value, at = read(), time.Now()
		}
		return value
	}
}

// page returns the URL of the page of an action, "" without a console.
func (s *server) page(instance string, action cas.Digest) string {
	if s.web == nil {
		return ""
	}
	return s.web.url + console.ActionPath(action.String(), instance)
}

// withPage adds a line with the page of the action to the command line that reruns it.
func (s *server) withPage(rerun func(*worker.Task) string) func(*worker.Task) string {
	return func(t *worker.Task) string {
		text, page := rerun(t), s.page(t.Instance, t.Action)
		if text != "" && page != "" {
			text += "\ncloister: page: " + page
		}
		return text
	}
}

// serve serves the console until close.
func (w *webPort) serve(log *slog.Logger) {
	go func() {
		if err := w.grpc.Serve(w.loop); err != nil {
			log.Error("the gRPC server of the web console failed", "err", err)
		}
	}()
	go func() {
		if err := w.server.Serve(w.listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the web console is no longer served", "err", err)
		}
	}()
}
