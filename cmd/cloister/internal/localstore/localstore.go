// SPDX-License-Identifier: Apache-2.0

// Package localstore opens the store of this machine, directly or through the process that holds it, or the store of a
// server, and reports on its contents.
package localstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

// A Store is the flags that select a store, and once opened the connection to it.
type Store struct {
	Dir    string // "" for that of a server
	JSON   bool
	lease  flags.Duration
	server *client.Server
	cmd    *cobra.Command

	*diskctl.Client
}

// Register adds the flags to a command that prints a value like one of printed with --json. The caller adds those of
// server, whose store is used if --dir is not set and a server is named.
func (s *Store) Register(cmd *cobra.Command, server *client.Server, printed ...any) {
	s.cmd, s.server = cmd, server
	s.lease = flags.Duration(disk.DefaultLease)
	f := cmd.Flags()
	f.StringVar(&s.Dir, "dir", "", "directory of a local store (default, unless a server is named: cloister in the user's cache directory)")
	f.Var(&s.lease, "lease", "lease of used blobs, if no running serve provides it")
	render.JSONFlag(f, &s.JSON, "print JSON", printed...)
}

// Open opens the store, or connects to the process that holds it. The caller closes the Store.
func (s *Store) Open(ctx context.Context) error {
	if s.Remote() {
		conn, _, err := s.server.Dial()
		if err != nil {
			return err
		}
		s.Client = diskctl.Connect(conn, s.server.ExplainCall)
		return nil
	}
	var err error
	if s.Dir, err = storedir.Path(s.Dir); err != nil {
		return err
	}
	s.Client, err = diskctl.Open(ctx, s.Dir, storedir.Lease(s.lease))
	if errors.Is(err, diskctl.ErrNoStore) {
		err = fmt.Errorf("%w: pass the directory of serve with --dir", err)
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

// Finish closes the store after a command that changed it. It joins an error of Close to *err, since what the command
// wrote may be lost.
func (s *Store) Finish(err *error) {
	closed := s.Close()
	if closed == nil {
		return
	}
	closed = fmt.Errorf("close the store: %w", closed)
	code, first := exit.Environment, *err
	if e, ok := errors.AsType[*exit.Error](first); ok {
		code, first = e.Code, e.Err
	}
	*err = exit.New(code, errors.Join(first, closed))
}

// Remote reports whether the store is that of a server.
func (s *Store) Remote() bool {
	return s.server != nil && s.Dir == "" && s.server.Named(s.cmd)
}

// Explain adds the exit code to an error of the store.
func (s *Store) Explain(err error) error {
	if _, ok := errors.AsType[*exit.Error](err); ok || err == nil {
		return err
	}
	return exit.New(exit.Environment, err)
}

// Description names the store and the process that holds it.
func (s *Store) Description() string {
	if s.Remote() {
		return s.server.Address
	}
	if pid := s.Holder(); pid > 0 {
		return fmt.Sprintf("%s, held by process %d, which answers", s.Dir, pid)
	}
	return s.Dir + ", held by no process"
}
