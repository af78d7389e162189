// SPDX-License-Identifier: Apache-2.0

package server

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/service"
	"github.com/cloister-build/cloister/worker/transport"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// Auth is the flags that control who can reach a server, and what they can do there.
type Auth struct {
	cert, key, clientCA, auth string
	failClosed                bool

	// Set by open: the rules, nil if everyone has all rights, and the TLS options.
	rules  *access.Live
	pair   *transport.Pair // nil without TLS, as config
	config *tls.Config
	tls    []grpc.ServerOption
}

// Register adds the flags.
func (a *Auth) Register(f *pflag.FlagSet) {
	f.StringVar(&a.cert, "tls-cert", "", "PEM file of the server certificate, reloaded when it changes; clients connect with grpcs://")
	f.StringVar(&a.key, "tls-key", "", "PEM file of the key of --tls-cert")
	f.StringVar(&a.clientCA, "tls-client-ca", "", "PEM file of the authorities of client certificates; without --auth every client needs one")
	f.StringVar(&a.auth, "auth", "", "file of callers and their rights, reloaded when it changes (default: everyone has all rights)")
	f.BoolVar(&a.failClosed, "auth-fail-closed", false, "refuse every call while the file of --auth is invalid, instead of keeping the previous rights")
}

// check validates the flags.
func (a *Auth) check() error {
	switch {
	case (a.cert == "") != (a.key == ""):
		return errors.New("--tls-cert and --tls-key go together")
	case a.clientCA != "" && a.cert == "":
		return errors.New("--tls-client-ca needs --tls-cert: clients show certificates only over TLS")
	case a.failClosed && a.auth == "":
		return errors.New("--auth-fail-closed needs --auth")
	}
	return nil
}

// open reads the files. Any mistake in them is an error, so that no unprotected server starts.
func (a *Auth) open(log *slog.Logger) error {
	if a.cert != "" {
		pair, err := transport.NewPair(a.cert, a.key, log)
		if err != nil {
			return exit.New(exit.Usage, fmt.Errorf("--tls-cert: %w", err))
		}
		config, err := pair.Server(a.clientCA, a.auth == "")
		if err != nil {
			return exit.New(exit.Usage, fmt.Errorf("--tls-client-ca: %w", err))
		}
		a.pair, a.config, a.tls = pair, config, []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}
	}
	if a.auth == "" {
		return nil
	}
	rules, err := access.NewLive(a.auth, func(r *access.Rules) error {
		switch {
		case r.Certificates() && a.clientCA == "":
			return fmt.Errorf("%s has callers with certificates: pass --tls-client-ca to verify them", a.auth)
		case r.Tokens() && a.cert == "":
			log.Warn("clients send tokens in clear text; pass --tls-cert, or use a TLS proxy", "auth", a.auth)
		}
		return nil
	}, log)
	if err != nil {
		return exit.New(exit.Usage, fmt.Errorf("--auth: %w", err))
	}
	rules.FailClosed.Store(a.failClosed)
	a.rules = rules
	return nil
}

// stale returns why the callers file is not in force, "" if it is, and whether calls are refused until it is.
func (a *Auth) stale() (text string, closed bool) {
	err := a.rules.Stale()
	switch {
	case err == nil:
		return "", false
	case a.failClosed:
		return fmt.Sprintf("every call is refused: the callers file cannot be read: %v", err), true
	default:
		return fmt.Sprintf("previous rights are in force: the callers file cannot be read: %v", err), false
	}
}

// staleCertificate returns why the certificate in the files is not in use, "" if it is.
func (a *Auth) staleCertificate() string {
	if err := a.pair.Stale(); err != nil {
		return fmt.Sprintf("previous certificate is in use: the certificate cannot be read: %v", err)
	}
	return ""
}

// close ends what open began.
func (a *Auth) close() {
	if a.rules != nil {
		a.rules.Close()
	}
}

// clients returns the options of the server for clients, which check every call.
func (a *Auth) clients() []grpc.ServerOption {
	return slices.Concat(a.tls, a.checks())
}

// checks returns the options that check the calls of clients.
func (a *Auth) checks() []grpc.ServerOption {
	if a.rules == nil {
		return nil
	}
	return a.rules.Options()
}

// workers returns the options of the server for workers, which check every call.
func (a *Auth) workers() []grpc.ServerOption {
	if a.rules == nil {
		return a.tls
	}
	return slices.Concat(a.tls, a.rules.WorkerOptions())
}

// access returns who calls and what it may do, nil without --auth.
func (a *Auth) access() service.Access {
	if a.rules == nil {
		return nil
	}
	return a.rules
}

// scheme returns the URL scheme of the server.
func (a *Auth) scheme() string {
	if a.cert != "" {
		return "grpcs"
	}
	return "grpc"
}

// summary describes who has access, or returns "" if everyone has.
func (a *Auth) summary() string {
	var parts []string
	if a.cert != "" {
		parts = append(parts, "TLS")
	}
	switch {
	case a.rules != nil:
		parts = append(parts, fmt.Sprintf("%s of %s", a.rules.Rules(), a.auth))
	case a.clientCA != "":
		parts = append(parts, "everyone with a certificate of "+a.clientCA+" has all rights")
	case a.cert != "":
		parts = append(parts, "everyone who can connect has all rights")
	}
	return strings.Join(parts, ", ")
}

// public reports whether everyone on a network has all rights.
func (a *Auth) public(at net.Addr) bool {
	tcp, ok := at.(*net.TCPAddr)
	return a.rules == nil && a.clientCA == "" && !(ok && tcp.IP.IsLoopback())
}
