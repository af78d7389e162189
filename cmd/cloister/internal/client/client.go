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
	_ "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Server is the flags that say where an action is stored.
type Server struct {
	Address  string
	Instance string
	Identity identity.Flags
}

func (o *Server) Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.Address, "cas", "grpc://"+DefaultAddress, "address of the server: grpc://HOST:PORT or grpcs://HOST:PORT")
	f.StringVar(&o.Instance, "instance", "", "instance name")
	o.Identity.Register(f, "")
}

// Open connects to the server. The caller closes what it returns.
func (o *Server) Open(ctx context.Context) (*remote.Store, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	options, err := o.Identity.DialOptions(o.Address)
	if err != nil {
		return nil, err
	}
	c, err := remote.Dial(ctx, strings.TrimRight(o.Address, "/")+"/"+url.PathEscape(o.Instance), options...)
	switch {
	case errors.Is(err, remote.ErrAddress), errors.Is(err, cas.ErrInvalid):
		return nil, exit.New(exit.Usage, fmt.Errorf("--cas, --instance: %w", err))
	case errors.Is(err, os.ErrPermission): // it was reached, and refuses
		return nil, exit.New(exit.No, err)
	case err != nil:
		return nil, exit.New(exit.Unreachable, fmt.Errorf("%w; name the server with --cas", err))
	}
	return c.Store("")
}

// Explain gives err, of reading an action from the server, its exit code.
func (o *Server) Explain(err error, code int) error {
	var e *exit.Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, cas.ErrNotFound):
		return exit.New(exit.Absent, err)
	case errors.Is(err, cas.ErrUnavailable):
		return exit.New(exit.Unreachable, err)
	}
	return exit.New(code, err)
}

// AbsentError is the error for blobs of an action that the server does not have.
func (o *Server) AbsentError(action cas.Digest, blobs []cas.Digest) error {
	const named = 10
	var list strings.Builder
	for i, d := range blobs[:min(named, len(blobs))] {
		if i > 0 {
			list.WriteString(", ")
		}
		list.WriteString(d.String())
	}
	if len(blobs) > named {
		fmt.Fprintf(&list, " and %d more", len(blobs)-named)
	}
	return exit.New(exit.Absent, fmt.Errorf("action %s: absent from %s, instance %q: %s; "+
		"execute it there once more, so that its client uploads them", action, o.Address, o.Instance, &list))
}

// Dial returns a connection on which calls may be silent for as long as they like, and the name of the instance. The
// caller closes the connection.
func (o *Server) Dial() (*grpc.ClientConn, string, error) {
	u, err := url.Parse(o.Address)
	if err != nil || u.Port() == "" || u.User != nil || u.Scheme != "grpc" && u.Scheme != "grpcs" {
		return nil, "", exit.New(exit.Usage, fmt.Errorf("--cas: %w", remote.ErrAddress))
	}
	options, err := o.Identity.DialOptions(o.Address)
	if err != nil {
		return nil, "", err
	}
	options = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)
	conn, err := grpc.NewClient(u.Host, options...)
	if err != nil {
		return nil, "", exit.New(exit.Usage, fmt.Errorf("--cas: %w", err))
	}
	return conn, strings.Trim(u.Path+"/"+o.Instance, "/"), nil
}

// WithStore runs f with the server that from names, and gives its error an exit code.
func WithStore(ctx context.Context, from *Server, f func(ctx context.Context, s *remote.Store) error) error {
	ctx, end := interrupt.Context(ctx)
	defer end()
	s, err := from.Open(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := f(ctx, s); err != nil {
		if ctx.Err() != nil {
			return interrupt.Explain(ctx, err, "stopped")
		}
		return from.Explain(err, exit.No)
	}
	return nil
}

// ParseDigests returns the digests that the command line names.
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

// DefaultAddress is where serve listens, and where other commands look for it.
const DefaultAddress = "127.0.0.1:8980"
