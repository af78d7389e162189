// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// slowStore collects 4 of 10 MiB, and ends once its size was asked for when 1 MiB was gone, and again.
type slowStore struct {
	cloisterpb.UnimplementedStoreServer
	asked chan struct{}
	dry   int
}

func (s *slowStore) Stat(context.Context, *cloisterpb.StatRequest) (*cloisterpb.StatResponse, error) {
	s.asked <- struct{}{}
	return &cloisterpb.StatResponse{Bytes: 9 << 20}, nil
}

func (s *slowStore) Collect(_ context.Context, r *cloisterpb.CollectRequest) (*cloisterpb.CollectResponse, error) {
	if r.DryRun {
		s.dry++
	} else {
		<-s.asked
		<-s.asked
	}
	return &cloisterpb.CollectResponse{Freed: 4 << 20}, nil
}

// TestGcShowsProgress on a terminal only, where it first asks how much there is to remove.
func TestGcShowsProgress(t *testing.T) {
	s := &slowStore{asked: make(chan struct{}, 2)}
	at := grpctest.Serve(t, func(g *grpc.Server) { cloisterpb.RegisterStoreServer(g, s) })
	conn := must.Get(grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	c := &gcConfig{store: localstore.Store{Client: diskctl.Connect(conn, func(err error) error { return err })}}
	t.Cleanup(func() { c.store.Close() })
	o := disk.CollectOptions{OlderThan: time.Hour}

	s.asked <- struct{}{}
	s.asked <- struct{}{}
	r, err := c.collect(t.Context(), o, 10<<20, terminal.NewProgress(io.Discard, "gc "))
	expect.That(t, err == nil && r.Freed == 4<<20 && s.dry == 0, "without a terminal: got %+v, %v after %d dry runs", r, err, s.dry)

	none := must.Get(os.Open(os.DevNull))(t)
	defer none.Close()
	shown, screen, err := os.Pipe()
	must.Succeed(t, err)
	defer shown.Close()
	person := must.Get(terminal.Open(none, screen))(t)
	r, err = c.collect(t.Context(), o, 10<<20, terminal.NewProgress(person.TTY, "gc "))
	expect.That(t, err == nil && r.Freed == 4<<20 && s.dry == 1, "on a terminal: got %+v, %v after %d dry runs", r, err, s.dry)
	person.Close()
	screen.Close()
	text := string(must.Get(io.ReadAll(shown))(t))
	expect.That(t, strings.Contains(text, "\r\x1b[Kgc 1.0 MiB of 4.0 MiB") && strings.HasSuffix(text, "\r\x1b[K"), "got %q", text)
}
