// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// holding is a store whose Put reads everything and then hangs, like one whose upstream does not answer.
type holding struct {
	cas.Store
	read  chan struct{} // receives when everything is read
	ended chan error
}

func (h *holding) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	h.read <- struct{}{}
	<-ctx.Done()
	h.ended <- ctx.Err()
	return ctx.Err()
}

// Only the context of the upload can end a hanging Put.
func TestStopEndsUploadThatHangsInStore(t *testing.T) {
	m := castest.NewMemory()
	h := &holding{m, make(chan struct{}, 1), make(chan error, 1)}
	s := grpc.NewServer(casserver.ServerOptions(nil)...)
	endUploads := must.Get(casserver.Register(s, casserver.Config{Instances: instances(h, m)}))(t)
	c := &client{}
	c.connect(t, s, nil)
	c.open(t.Context(), t, message(uploadName("12345678"), 0, "1234", false), message("", 4, "5678", true))
	<-h.read
	graceful := make(chan struct{})
	go func() {
		s.GracefulStop()
		close(graceful)
	}()
	s.Stop()
	select {
	case <-graceful:
	case <-time.After(time.Minute):
		t.Fatal("the server does not stop: a call waits for an upload whose context has ended")
	}
	endUploads()
	<-h.ended
}

// Clients that give up on a hanging store and retry must not accumulate uploads.
func TestUploadsThatHangInStoreAreLimited(t *testing.T) {
	m := castest.NewMemory()
	const kept, more = 64, 3
	h := &holding{m, make(chan struct{}), make(chan error, kept+more)}
	c := serve(t, casserver.Config{Instances: instances(h, m)})
	for i := range kept + more {
		ctx, cancel := context.WithCancel(t.Context())
		name := fmt.Sprintf("uploads/u%d/%s", i, sum("12345678").Resource())
		c.open(ctx, t, message(name, 0, "1234", false), message("", 4, "5678", true))
		<-h.read
		cancel()
	}
	for range more {
		<-h.ended
	}
	c.stop()
	expect.Equal(t, len(h.ended), kept, "uploads that have ended when the server stops")
}

// stepping is a store whose Put reads 4 bytes, and when permitted 2 more and the rest.
type stepping struct {
	cas.Store
	four, more, six chan struct{}
}

func (s *stepping) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	b := make([]byte, 6)
	if _, err := io.ReadFull(r, b[:4]); err != nil {
		return err
	}
	s.four <- struct{}{}
	<-s.more
	if _, err := io.ReadFull(r, b[4:]); err != nil {
		return err
	}
	s.six <- struct{}{}
	return s.Store.Put(ctx, d, io.MultiReader(bytes.NewReader(b), r))
}

// A reported offset stays valid although more data of the lost stream is read afterwards: Bazel fails a build on
// INVALID_ARGUMENT.
func TestRule046_ReportedOffsetStaysValid(t *testing.T) {
	m := castest.NewMemory()
	s := &stepping{m, make(chan struct{}), make(chan struct{}), make(chan struct{})}
	c := serve(t, casserver.Config{Instances: instances(s, m)})
	name := uploadName("12345678")
	lost := c.open(t.Context(), t, message(name, 0, "1234", false), message("", 4, "56", false))
	<-s.four
	if n, complete, code := c.query(t, name); n != 4 || complete || code != codes.OK {
		t.Fatalf("got %d, %v, %v, want 4 bytes", n, complete, code)
	}
	close(s.more)
	<-s.six
	for _, off := range []int64{3, 7} {
		_, err := c.write(t.Context(), message(name, off, "x", true))
		wantCode(t, err, codes.InvalidArgument, "resume at offset 6")
	}
	expect.Equal(t, must.Get(c.write(t.Context(), message(name, 4, "5", false), message("", 5, "678", true)))(t), 8)
	wantCode(t, lost.RecvMsg(&bspb.WriteResponse{}), codes.Aborted)
	if missing, err := m.Missing(t.Context(), []cas.Digest{sum("12345678")}); err != nil || len(missing) > 0 {
		t.Errorf("missing %v, %v", missing, err)
	}
}
