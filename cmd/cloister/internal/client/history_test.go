// SPDX-License-Identifier: Apache-2.0

package client

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/history"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// server serves what register adds, and returns its client flags.
func server(t *testing.T, register func(*grpc.Server), options ...grpc.ServerOption) *Server {
	t.Helper()
	return &Server{Address: "grpc://" + grpctest.Serve(t, register, options...)}
}

// TestActionByPrefix: a name selects its action, or the error says why not.
func TestActionByPrefix(t *testing.T) {
	l := must.Get(history.Open(history.Config{Dir: t.TempDir()}))(t)
	defer l.Close()
	from := server(t, func(g *grpc.Server) { register(t, g, l) })
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
		got, err := from.Action(t.Context(), name)
		expect.That(t, err == nil && got.Digest.String() == want, "%s is %v, want %s: %v", name, got, want, err)
	}
	if got, err := from.Action(t.Context(), "^3"); err != nil || got.Target != "//t7" || got.Mnemonic != "M" {
		t.Errorf("^3 is %+v, %v", got, err)
	}
	for name, want := range map[string]struct {
		code int
		text string
	}{
		"^10": {exit.Absent, "only 9 actions"}, "cccccccc": {exit.Absent, "no action"}, "00000000": {exit.No, "several"},
		"^0": {exit.Usage, "HASH/SIZE"}, "bbbbbbb": {exit.Usage, "HASH/SIZE"}, "BBBBBBBB": {exit.Usage, "HASH/SIZE"}, "": {exit.Usage, "HASH/SIZE"},
	} {
		_, err := from.Action(t.Context(), name)
		e, _ := errors.AsType[*exit.Error](err)
		if err == nil || !strings.Contains(err.Error(), want.text) || (e == nil) != (want.code == 0) || e != nil && e.Code != want.code {
			t.Errorf("%s: %v, want exit code %d and %q", name, err, want.code, want.text)
		}
	}
	chosen, err := from.Actions(t.Context(), Filter{Target: "//t*", Mnemonic: "M"}, 3)
	if err != nil || len(chosen) != 3 || chosen[0].Target != "//t7" || chosen[2].Digest.String() != digest(5) {
		t.Errorf("chosen are %v, %v", chosen, err)
	}

	for name, silent := range map[string]*Server{
		"keeps no history": server(t, func(*grpc.Server) {}),
		"shows no history": server(t, func(g *grpc.Server) { register(t, g, l) },
			grpc.StreamInterceptor(func(any, grpc.ServerStream, *grpc.StreamServerInfo, grpc.StreamHandler) error {
				return status.Error(codes.PermissionDenied, "not you")
			})),
	} {
		for _, action := range []string{"^1", "00000000"} {
			if _, err := silent.Action(t.Context(), action); !errors.Is(err, ErrNoHistory) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s of a server that %s: %v", action, name, err)
			}
		}
		expect.Equal(t, must.Get(silent.Action(t.Context(), digest(1)))(t).Digest.String(), digest(1),
			"a digest at a server that %s", name)
	}
}

// TestOlderSelectsPackages: /... means a package and those below it, and no other with a longer name.
func TestOlderSelectsPackages(t *testing.T) {
	l := must.Get(history.Open(history.Config{Dir: t.TempDir()}))(t)
	defer l.Close()
	from := server(t, func(g *grpc.Server) { register(t, g, l) })
	targets := []string{"//server:a", "//server/api:b", "//server2:c", "//server2/api:d", "@@repo//server:e"}
	for i, target := range targets {
		l.Add(history.Entry{Action: fmt.Sprintf("%064x/1", i), How: history.Executed, Target: target})
	}
	l.Add(history.Entry{Action: fmt.Sprintf("%064x/1", 0), How: history.Executed, Target: "//server/api:shares"})
	for target, want := range map[string]string{
		"//server/...": "//server:a //server/api:b", "//server2/...": "//server2:c //server2/api:d", "@@repo//...": "@@repo//server:e",
		"//...": "//server:a //server/api:b //server2:c //server2/api:d", "//server*": "//server:a //server/api:b //server2:c //server2/api:d",
		"//server:a": "//server:a", "//serv/...": "",
	} {
		ds, err := from.Older(t.Context(), Filter{Target: target}, time.Now().Add(time.Hour))
		var got []string
		for i, label := range targets {
			for _, d := range ds {
				if d.Hash() == fmt.Sprintf("%064x", i) {
					got = append(got, label)
				}
			}
		}
		expect.That(t, err == nil && strings.Join(got, " ") == want,
			"%s selects %q, %v, want %s", target, got, err, want)
	}
}

// A boundless is a history that never ends, or ends with a hostile message.
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

// TestHostileHistories: the client stops at its limit and escapes what the server sends.
func TestHostileHistories(t *testing.T) {
	from := server(t, func(g *grpc.Server) { cloisterpb.RegisterHistoryServer(g, &boundless{}) })
	expect.Equal(t, len(must.Get(from.Actions(t.Context(), Filter{All: true}, 3))(t)), 3)
	for _, code := range []codes.Code{codes.Internal, codes.PermissionDenied, codes.Unavailable} {
		from := server(t, func(g *grpc.Server) {
			cloisterpb.RegisterHistoryServer(g, &boundless{err: status.Error(code, "\x1b[2J"+strings.Repeat("x", 5000))})
		})
		_, err := from.Actions(t.Context(), Filter{All: true}, 3)
		expect.That(t, err != nil && !strings.Contains(err.Error(), "\x1b") && len(err.Error()) <= 1500,
			"%v: %q", code, err)
	}
}

// register adds the service of l to g.
func register(t *testing.T, g *grpc.Server, l *history.Log) {
	t.Helper()
	must.Succeed(t, history.Register(g, l, castest.Instances(), nil))
}
