// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
)

// slowImages reports progress twice before it has an image.
type slowImages struct {
	cloisterpb.UnimplementedImagesServer
}

func (slowImages) Pull(
	_ *cloisterpb.PullImageRequest, to grpc.ServerStreamingServer[cloisterpb.PullImageResponse],
) error {
	for _, m := range []*cloisterpb.PullImageResponse{
		{Progress: &cloisterpb.ImagePull{}},
		{Progress: &cloisterpb.ImagePull{ReadBytes: 1 << 20, TotalBytes: 4 << 20}},
		{Image: &cloisterpb.ContainerImage{Pinned: "tools@sha256:0", Files: 2, Bytes: 2048, Dropped: 3}},
	} {
		if err := to.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// TestImagePullShowsProgress on a terminal only.
func TestImagePullShowsProgress(t *testing.T) {
	at := grpctest.Serve(t, func(s *grpc.Server) { cloisterpb.RegisterImagesServer(s, slowImages{}) })
	pull := func(info io.Writer) {
		t.Helper()
		c := &imageConfig{from: client.Server{Address: "grpc://" + at}, remote: true}
		var out bytes.Buffer
		if err := imagePull(t.Context(), c, "tools", &out, info); err != nil || out.String() != "docker://tools@sha256:0\n" {
			t.Errorf("got %q, %v", out.String(), err)
		}
	}
	const size = "2.0 KiB in 2 files; its devices, sockets and pipes (3) were dropped"
	var plain bytes.Buffer
	if pull(&plain); plain.String() != size+"\n" {
		t.Errorf("without a terminal: got %q, want %q", plain.String(), size)
	}

	none := must.Get(os.Open(os.DevNull))(t)
	defer none.Close()
	shown, screen, err := os.Pipe()
	must.Succeed(t, err)
	defer shown.Close()
	person := must.Get(terminal.Open(none, screen))(t)
	pull(person.TTY)
	person.Close()
	screen.Close()
	text, err := io.ReadAll(shown)
	want := strings.Join([]string{"", "pull     queued", "pull     1.0 MiB of 4.0 MiB", size}, "\r\x1b[K")
	expect.That(t, err == nil && strings.HasPrefix(string(text), want),
		"on a terminal: got %q, %v, want %q", text, err, want)
}
