// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker/history"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// listening serves what register adds, until the test ends, and returns where.
func listening(t *testing.T, register func(*grpc.Server), options ...grpc.ServerOption) *origin {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(options...)
	register(g)
	ended := make(chan struct{})
	go func() { g.Serve(l); close(ended) }()
	t.Cleanup(func() { g.Stop(); <-ended })
	return &origin{cas: "grpc://" + l.Addr().String()}
}

// TestActionsByTheirBeginning: what is meant is said, or why it cannot be known.
func TestActionsByTheirBeginning(t *testing.T) {
	l, err := history.Open(history.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	from := listening(t, func(g *grpc.Server) { history.Register(g, l, castest.Instances()) })
	digest := func(i int) string { return fmt.Sprintf("%056d%08x/%d", 0, i, i) }
	for i := range 8 {
		l.Add(history.Entry{Action: digest(i), How: history.Executed, Target: fmt.Sprint("//t", i), Mnemonic: "M"})
	}
	l.Add(history.Entry{Action: digest(2), How: history.Cached})
	blake := "blake3:" + strings.Repeat("b", 64) + "/3"
	l.Add(history.Entry{Action: blake, How: history.Executed})
	l.Add(history.Entry{Action: strings.Repeat("c", 64) + "/7", How: history.Executed, Instance: "other"})

	for name, want := range map[string]string{
		digest(5): digest(5), digest(100): digest(100), "^1": blake, "^2": digest(2), "^3": digest(7), "^9": digest(0),
		digest(3)[:64]: digest(3), digest(3)[:64] + "/": digest(3), "bbbbbbbb": blake, "blake3:bbbbbbbb": blake,
	} {
		got, err := from.subject(t.Context(), name)
		if err != nil || got.digest.String() != want {
			t.Errorf("%s is %v, want %s: %v", name, got, want, err)
		}
	}
	if got, err := from.subject(t.Context(), "^3"); err != nil || got.target != "//t7" || got.mnemonic != "M" {
		t.Errorf("^3 is %+v, %v", got, err)
	}
	for name, want := range map[string]struct {
		code int
		text string
	}{
		"^10": {exitAbsent, "9 actions"}, "cccccccc": {exitAbsent, "no action"}, "00000000": {exitNo, "several"},
		"^0": {0, "HASH/SIZE"}, "bbbbbbb": {0, "HASH/SIZE"}, "BBBBBBBB": {0, "HASH/SIZE"}, "": {0, "HASH/SIZE"},
	} {
		_, err := from.subject(t.Context(), name)
		e, _ := errors.AsType[*exit](err)
		if err == nil || !strings.Contains(err.Error(), want.text) || (e == nil) != (want.code == 0) || e != nil && e.code != want.code {
			t.Errorf("%s: %v, want exit code %d and %q", name, err, want.code, want.text)
		}
	}
	chosen, err := from.subjects(t.Context(), selection{target: "//t*", mnemonic: "M"}, 3)
	if err != nil || len(chosen) != 3 || chosen[0].target != "//t7" || chosen[2].digest.String() != digest(5) {
		t.Errorf("chosen are %v, %v", chosen, err)
	}

	for name, silent := range map[string]*origin{
		"keeps no history": listening(t, func(*grpc.Server) {}),
		"shows no history": listening(t, func(g *grpc.Server) { history.Register(g, l, castest.Instances()) },
			grpc.StreamInterceptor(func(any, grpc.ServerStream, *grpc.StreamServerInfo, grpc.StreamHandler) error {
				return status.Error(codes.PermissionDenied, "not you")
			})),
	} {
		for _, action := range []string{"^1", "00000000"} {
			if _, err := silent.subject(t.Context(), action); !errors.Is(err, errNoHistory) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s of a server that %s: %v", action, name, err)
			}
		}
		if got, err := silent.subject(t.Context(), digest(1)); err != nil || got.digest.String() != digest(1) {
			t.Errorf("a digest at a server that %s: %v", name, err)
		}
	}
}

// A boundless is a server's history that does not end, or ends with what commands a terminal.
type boundless struct {
	cloisterpb.UnimplementedHistoryServer
	err error
}

func (b *boundless) List(_ *cloisterpb.ListHistoryRequest, to grpc.ServerStreamingServer[cloisterpb.ListHistoryResponse]) error {
	for b.err == nil {
		if err := to.Send(&cloisterpb.ListHistoryResponse{Entries: []*cloisterpb.HistoryEntry{{Action: strings.Repeat("a", 64) + "/1"}}}); err != nil {
			return err
		}
	}
	return b.err
}

// TestHostileHistories: no more is taken than was asked for, and nothing of what is said reaches a terminal as it is.
func TestHostileHistories(t *testing.T) {
	from := listening(t, func(g *grpc.Server) { cloisterpb.RegisterHistoryServer(g, &boundless{}) })
	if all, err := from.subjects(t.Context(), selection{all: true}, 3); err != nil || len(all) != 3 {
		t.Errorf("%d entries, %v", len(all), err)
	}
	for _, code := range []codes.Code{codes.Internal, codes.PermissionDenied, codes.Unavailable} {
		from := listening(t, func(g *grpc.Server) {
			cloisterpb.RegisterHistoryServer(g, &boundless{err: status.Error(code, "\x1b[2J"+strings.Repeat("x", 5000))})
		})
		_, err := from.subjects(t.Context(), selection{all: true}, 3)
		if err == nil || strings.Contains(err.Error(), "\x1b") || len(err.Error()) > 1500 {
			t.Errorf("%v: %q", code, err)
		}
	}
}

// TestMessagesAreRecognised, and texts are none.
func TestMessagesAreRecognised(t *testing.T) {
	d := cas.SHA256.Sum([]byte("x")).Proto()
	dir := &repb.Directory{
		Files:       []*repb.FileNode{{Name: "f", Digest: d, IsExecutable: true}},
		Directories: []*repb.DirectoryNode{{Name: "d", Digest: d}},
		Symlinks:    []*repb.SymlinkNode{{Name: "l", Target: "t"}},
	}
	for want, all := range map[string][]proto.Message{
		"action": {&repb.Action{CommandDigest: d, InputRootDigest: d}, &repb.Action{CommandDigest: d, InputRootDigest: cas.SHA256.Sum(nil).Proto(), DoNotCache: true}},
		"command": {&repb.Command{Arguments: []string{"/bin/sh", "-c", "x"}, OutputPaths: []string{"o"}},
			&repb.Command{Arguments: []string{"a"}, EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A", Value: "b"}}}},
		"directory": {dir, &repb.Directory{}, &repb.Directory{Files: dir.Files}, &repb.Directory{Symlinks: dir.Symlinks}},
		"tree":      {&repb.Tree{Root: dir}, &repb.Tree{Root: &repb.Directory{}, Children: []*repb.Directory{dir}}, &repb.Tree{Root: &repb.Directory{Files: dir.Files}}},
	} {
		for _, m := range all {
			b, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			if got := message(b, cas.SHA256); got != want {
				t.Errorf("%v is taken for %q, want %q", m, got, want)
			}
		}
	}
	for _, text := range []string{"a text\n", "\n\n", "{}", "\x7fELF\x02\x01\x01", "cloister-manifest v1\n", "#!/bin/sh\n", "\x00\x00"} {
		if got := message([]byte(text), cas.SHA256); got != "" {
			t.Errorf("%q is taken for %q", text, got)
		}
	}
}
