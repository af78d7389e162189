// SPDX-License-Identifier: Apache-2.0

// Package client connects commands to a Remote Execution API server, and finds actions in the history of a cloister
// serve.
package client

import (
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
	"github.com/cloister-build/cloister/cmd/internal/identity"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// DefaultAddress is where serve listens by default, and where other commands look for it.
const DefaultAddress = "127.0.0.1:8980"

// Server is the flags that select a server and an instance there.
type Server struct {
	Address  string
	Instance string
	Identity identity.Flags
}

// Register adds the flags.
func (s *Server) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.Address, "cas", "grpc://"+DefaultAddress, "address of the server: grpc://HOST:PORT or grpcs://HOST:PORT")
	f.StringVar(&s.Instance, "instance", "", "instance name")
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
	c, err := remote.Dial(ctx, strings.TrimRight(s.Address, "/")+"/"+url.PathEscape(s.Instance), options...)
	switch {
	case errors.Is(err, remote.ErrAddress), errors.Is(err, cas.ErrInvalid):
		return nil, exit.New(exit.Usage, fmt.Errorf("--cas, --instance: %w", err))
	case errors.Is(err, os.ErrPermission): // the server answered
		return nil, exit.New(exit.No, err)
	case err != nil:
		return nil, exit.New(exit.Unreachable, fmt.Errorf("%w; name the server with --cas", err))
	}
	return c.Store("")
}

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
	u, err := url.Parse(s.Address)
	if err != nil || u.Port() == "" || u.User != nil || u.Scheme != "grpc" && u.Scheme != "grpcs" {
		return nil, "", exit.New(exit.Usage, fmt.Errorf("--cas: %w", remote.ErrAddress))
	}
	options, err := s.Identity.DialOptions(s.Address)
	if err != nil {
		return nil, "", err
	}
	options = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)
	conn, err := grpc.NewClient(u.Host, options...)
	if err != nil {
		return nil, "", exit.New(exit.Usage, fmt.Errorf("--cas: %w", err))
	}
	return conn, strings.Trim(u.Path+"/"+s.Instance, "/"), nil
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

// ParseDigests parses digests from the command line.
func ParseDigests(args []string) ([]cas.Digest, error) {
	ds := make([]cas.Digest, len(args))
	for i, arg := range args {
		var err error
		if ds[i], err = cas.ParseDigest(arg); err != nil {
			return nil, err
		}
	}
	return ds, nil
}
