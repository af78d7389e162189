// SPDX-License-Identifier: Apache-2.0

// Package client connects commands to a Remote Execution API server, and finds actions in the history of a cloister
// serve.
package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/cloister-build/cloister/worker/transport"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// DefaultAddress is where serve listens by default, and where other commands look for it.
const DefaultAddress = "127.0.0.1:8980"

// Server is the flags that select a server and an instance there. Without an instance, names of actions and builds are
// looked up in all instances; the first one found selects its instance.
type Server struct {
	Address  string
	Instance string
	Identity identity.Flags
	// Anywhere makes AllInstances true, and Options add to those of each connection, for callers without a command line.
	Anywhere bool
	Options  []grpc.DialOption
	flag     *pflag.Flag       // --instance, nil if the command has none
	first    string            // the name that selected the instance, "" if none did
	resolved map[string]Action // by name
}

// AllInstances reports whether the command line names no instance.
func (s *Server) AllInstances() bool {
	if s.Anywhere {
		return true
	}
	u, err := url.Parse(s.Address)
	return s.flag != nil && !s.flag.Changed && err == nil && strings.Trim(u.Path, "/") == ""
}

// selectInstance selects the instance of the action or build that a name on the command line stands for. It fails if an
// earlier name selected another instance.
func (s *Server) selectInstance(name, instance string) error {
	switch {
	case !s.AllInstances() || instance == s.Instance && s.first != "":
		return nil
	case s.first != "":
		return exit.New(exit.Usage, fmt.Errorf("%s is in instance %q, and %s in instance %q: select one with --instance",
			s.first, s.Instance, name, instance))
	}
	s.first, s.Instance = name, instance
	return nil
}

// Register adds the flags.
func (s *Server) Register(cmd *cobra.Command) {
	s.RegisterAddress(cmd)
	f := cmd.Flags()
	f.StringVar(&s.Instance, "instance", "", "instance name")
	s.flag = f.Lookup("instance")
	flags.AllowEmpty(f, "instance")
	flags.Share(f, "instance")
}

// RegisterAddress adds only the flags that select a server and identify the caller.
func (s *Server) RegisterAddress(cmd *cobra.Command) {
	const standard = "grpc://" + DefaultAddress
	f := cmd.Flags()
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "cas" { // as the flag was called when servers were only caches
			name = "server"
		}
		return pflag.NormalizedName(name)
	})
	f.StringVar(&s.Address, "server", cmp.Or(os.Getenv(flags.Variable("server")), standard),
		"address of the server: grpc://HOST:PORT or grpcs://HOST:PORT; CLOISTER_SERVER sets the default")
	f.Lookup("server").DefValue = standard // --help does not depend on the environment
	flags.Share(f, "server")
	s.Identity.Register(f, "")
}

// Open connects to the store of the server. The caller closes it.
func (s *Server) Open(ctx context.Context) (*remote.Store, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	options, err := s.Identity.DialOptions(s.Address)
	if err != nil {
		return nil, err
	}
	options = append(options, s.Options...)
	c, err := remote.Dial(ctx, strings.TrimRight(s.Address, "/")+"/"+url.PathEscape(s.Instance), options...)
	switch {
	case errors.Is(err, remote.ErrAddress), errors.Is(err, cas.ErrInvalid):
		return nil, exit.New(exit.Usage, fmt.Errorf("--server, --instance: %w", err))
	case errors.Is(err, os.ErrPermission): // the server answered
		return nil, exit.New(exit.No, err)
	case err != nil:
		reason := err.Error()
		if _, why, ok := strings.Cut(reason, ": unavailable: "); ok {
			reason = why // without the address, which the error names
		}
		return nil, s.Unreachable(reason)
	}
	return c.Store("")
}

// Unreachable returns the error for a server that did not answer for a reason.
func (s *Server) Unreachable(reason string) error {
	at := s.Address
	if u, err := url.Parse(at); err == nil && u.Host != "" {
		at = u.Host
	}
	if strings.HasSuffix(reason, "connection refused") {
		return exit.New(exit.Unreachable, fmt.Errorf(
			`no server at %s; start "cloister serve", or pass --server or set CLOISTER_SERVER`, at))
	}
	return exit.New(exit.Unreachable, fmt.Errorf("cannot reach the server at %s: %s; pass --server or set CLOISTER_SERVER", at, reason))
}

// ExplainCall returns the reason of a failed call of a service for operators of cloister serve, with its exit code.
func (s *Server) ExplainCall(err error) error {
	reason := remote.Reason(status.Convert(err))
	code := exit.No
	switch status.Code(err) {
	case codes.Unimplemented:
		reason = "it does not offer this: cloister serve does with --auth, to callers with the right operate; on its machine, pass --dir instead"
	case codes.NotFound:
		code = exit.Absent
	case codes.Unavailable, codes.DeadlineExceeded:
		return s.Unreachable(reason)
	}
	return exit.New(code, fmt.Errorf("the server at %s: %w", s.Address, &refusal{reason, err}))
}

// A refusal is the printable reason of a failed call, which keeps its status.
type refusal struct {
	reason string
	err    error
}

// Error implements error.
func (r *refusal) Error() string { return r.reason }

// GRPCStatus makes package status recognize the error.
func (r *refusal) GRPCStatus() *status.Status { return status.Convert(r.err) }

// Reason returns err, of a call, with a printable text that omits the code.
func Reason(err error) error { return &refusal{remote.Reason(status.Convert(err)), err} }

// Named reports whether the command line names a server. CLOISTER_SERVER does not count: what is meant for the store of
// this machine must not happen to another one because of a variable.
func (s *Server) Named(cmd *cobra.Command) bool { return cmd.Flags().Changed("server") }

// WithStore calls f with the store of a server until a signal arrives, and gives errors their exit codes.
func WithStore(ctx context.Context, from *Server, f func(ctx context.Context, s *remote.Store) error) error {
	ctx, stop := interrupt.Context(ctx)
	defer stop()
	s, err := from.Open(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	err = f(ctx, s)
	if err != nil && ctx.Err() != nil {
		return interrupt.Explain(ctx, err, "stopped")
	}
	return from.Explain(err, exit.No)
}

// Dial returns a connection on which calls may stay silent, and the name of the instance. The caller closes the
// connection.
func (s *Server) Dial() (*grpc.ClientConn, string, error) {
	conn, instance, err := transport.Dial(s.Address, s.Identity.Credentials(), s.Options...)
	if errors.Is(err, transport.ErrAddress) {
		return nil, "", exit.New(exit.Usage, fmt.Errorf("--server: %w", remote.ErrAddress))
	} else if err != nil {
		return nil, "", s.Identity.Explain(s.Address, err)
	}
	return conn, strings.Trim(instance+"/"+s.Instance, "/"), nil
}

// Explain adds the exit code to an error from reading the server's store. The default is code.
func (s *Server) Explain(err error, code int) error {
	if _, ok := errors.AsType[*exit.Error](err); err == nil || ok {
		return err
	}
	switch {
	case errors.Is(err, cas.ErrNotFound):
		code = exit.Absent
	case errors.Is(err, cas.ErrUnavailable):
		code = exit.Unreachable
	}
	return exit.New(code, err)
}

// AbsentError returns the error for blobs of an action that the server lacks.
func (s *Server) AbsentError(action cas.Digest, blobs []cas.Digest) error {
	const limit = 10
	var names []string
	for _, d := range blobs[:min(limit, len(blobs))] {
		names = append(names, d.String())
	}
	list := strings.Join(names, ", ")
	if len(blobs) > limit {
		list += fmt.Sprintf(" and %d more", len(blobs)-limit)
	}
	return exit.New(exit.Absent, fmt.Errorf("action %s: absent from %s, instance %q: %s; "+
		"execute it there again, so that its client uploads them", action, s.Address, s.Instance, list))
}
