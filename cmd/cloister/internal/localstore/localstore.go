// SPDX-License-Identifier: Apache-2.0

// Package localstore reaches the store of this machine, whether or not a serve holds it, and reports on its contents.
package localstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

// Store is the flags that say which store an operator means. It is also what became of them.
type Store struct {
	Dir   string
	lease flags.Duration
	JSON  bool

	*diskctl.Client
}

func (r *Store) Register(cmd *cobra.Command) {
	r.lease = flags.Duration(disk.DefaultLease)
	f := cmd.Flags()
	f.StringVar(&r.Dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.Var(&r.lease, "lease", "lease of used blobs, if no running serve provides it")
	f.BoolVar(&r.JSON, "json", false, "print JSON")
}

// Open reaches the store, which the caller closes.
func (r *Store) Open(ctx context.Context) error {
	var err error
	if r.Dir, err = storedir.Path(r.Dir); err != nil {
		return err
	}
	if r.Client, err = diskctl.Open(ctx, r.Dir, storedir.Lease(r.lease)); errors.Is(err, diskctl.ErrNoStore) {
		err = fmt.Errorf("%w: state with --dir the directory that serve was given", err)
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

// Description says who answers.
func (r *Store) Description() string {
	if pid := r.Client.Holder(); pid > 0 {
		return fmt.Sprintf("held by process %d, which was asked", pid)
	}
	return "held by nobody, opened for this"
}
