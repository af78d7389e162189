// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/access"
	"github.com/cloister-build/cloister/cmd/internal/certificate"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// ServerAuth is the flags that say who may reach a server, and do what there.
type ServerAuth struct {
	cert, key, clientCA, auth string

	// Once it is open: rules of auth, nil if everybody who can connect may do everything, and what connections need.
	rules *access.Live
	tls   []grpc.ServerOption
}

func (d *ServerAuth) Register(f *pflag.FlagSet) {
	f.StringVar(&d.cert, "tls-cert", "", "PEM file of the server certificate, reloaded when it changes; clients connect with grpcs://")
	f.StringVar(&d.key, "tls-key", "", "PEM file of the key of --tls-cert")
	f.StringVar(&d.clientCA, "tls-client-ca", "", "PEM file of the authorities of client certificates; without --auth every client needs one")
	f.StringVar(&d.auth, "auth", "", "file of callers and their rights, reloaded when it changes (default: everyone has all rights)")
}

// Check returns what is wrong with the flags, before anything is made.
func (d *ServerAuth) check() error {
	switch {
	case (d.cert == "") != (d.key == ""):
		return errors.New("--tls-cert and --tls-key go together")
	case d.clientCA != "" && d.cert == "":
		return errors.New("--tls-client-ca goes with --tls-cert: clients show a certificate only over TLS")
	}
	return nil
}

// open reads the files. Whatever is wrong with a file is an error: there is no server then.
func (d *ServerAuth) open(log *slog.Logger) error {
	if d.cert != "" {
		pair, err := certificate.NewPair(d.cert, d.key, log)
		if err != nil {
			return exit.New(exit.Usage, fmt.Errorf("--tls-cert: %w", err))
		}
		config, err := pair.Server(d.clientCA, d.auth == "")
		if err != nil {
			return exit.New(exit.Usage, fmt.Errorf("--tls-client-ca: %w", err))
		}
		d.tls = []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}
	}
	if d.auth == "" {
		return nil
	}
	rules, err := access.NewLive(d.auth, func(r *access.Rules) error {
		switch {
		case r.Certificates() && d.clientCA == "":
			return fmt.Errorf("%s knows callers by certificates, which --tls-client-ca must say how to verify", d.auth)
		case r.Tokens() && d.cert == "":
			log.Warn("tokens are sent to this server in clear text: give it --tls-cert, or put a proxy with TLS in front of it", "auth", d.auth)
		}
		return nil
	}, log)
	if err != nil {
		return exit.New(exit.Usage, fmt.Errorf("--auth: %w", err))
	}
	d.rules = rules
	return nil
}

// clients returns the options of a server that holds every call of a client against the files.
func (d *ServerAuth) clients() []grpc.ServerOption {
	if d.rules == nil {
		return d.tls
	}
	return slices.Concat(d.tls, d.rules.Options())
}

// Workers returns the options of a server that holds every call of a worker against the files.
func (d *ServerAuth) workers() []grpc.ServerOption {
	if d.rules == nil {
		return d.tls
	}
	return slices.Concat(d.tls, d.rules.WorkerOptions())
}

// rights is casserver.Config.Rights where clients call, and workerRights where workers do.
func (d *ServerAuth) rights() func(ctx context.Context, instance string) (execute, update bool) {
	if d.rules == nil {
		return nil
	}
	return d.rules.Rules().Rights // which looks at who was admitted
}

func (d *ServerAuth) workerRights() func(ctx context.Context, instance string) (execute, update bool) {
	if d.rules == nil {
		return nil
	}
	return d.rules.Rules().WorkerRights
}

// caller names who calls, nil where callers are not known.
func (d *ServerAuth) caller() func(context.Context) string {
	if d.rules == nil {
		return nil
	}
	return d.rules.Rules().Caller
}

// scheme is how clients reach the server.
func (d *ServerAuth) scheme() string {
	if d.cert != "" {
		return "grpcs"
	}
	return "grpc"
}

// summary says to a person who may do what, or nothing where nobody is kept out.
func (d *ServerAuth) summary() string {
	var parts []string
	if d.cert != "" {
		parts = append(parts, "TLS")
	}
	switch {
	case d.rules != nil:
		parts = append(parts, fmt.Sprintf("%s of %s", d.rules.Rules(), d.auth))
	case d.clientCA != "":
		parts = append(parts, "everybody with a certificate of "+d.clientCA+" may do everything")
	case d.cert != "":
		parts = append(parts, "everybody who can connect may do everything")
	}
	return strings.Join(parts, ", ")
}

// public reports whether everybody on a network may do everything.
func (d *ServerAuth) public(at net.Addr) bool {
	tcp, ok := at.(*net.TCPAddr)
	return d.rules == nil && d.clientCA == "" && !(ok && tcp.IP.IsLoopback())
}
