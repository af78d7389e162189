// SPDX-License-Identifier: Apache-2.0

package reproduction

import (
	"context"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/worker/execclient"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/grpc"
)

// servers are the servers of --on, by their names there.
type servers map[string]*server

// A server executes actions and has their blobs.
type server struct {
	store    *remote.Store
	conn     *grpc.ClientConn
	instance string
}

func (all servers) close() {
	for _, s := range all {
		s.store.Close()
		if s.conn != nil {
			s.conn.Close()
		}
	}
}

// executor returns the server as an executor of an action, after uploading the action, marked as not to be cached, and
// its inputs from a store that has them.
func (s *server) executor(ctx context.Context, name string, from cas.Store, action cas.Digest) (*repro.Executor, error) {
	c, err := execclient.New(s.conn, s.instance)
	if err != nil {
		return nil, err
	}
	there, err := execclient.Upload(ctx, from, s.store, action)
	if err != nil {
		return nil, err
	}
	return &repro.Executor{Name: name, Executor: c, Store: s.store, Action: there}, nil
}
