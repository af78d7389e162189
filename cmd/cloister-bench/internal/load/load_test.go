// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/klauspost/compress/zstd"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	rpcpb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A spoiler changes answers before the server sends them.
type spoiler func(answer proto.Message)

// on returns a spoiler of the answers of type M.
func on[M proto.Message](spoil func(M)) spoiler {
	return func(answer proto.Message) {
		if m, ok := answer.(M); ok {
			spoil(m)
		}
	}
}

// serve serves a store in memory, and returns its address and the store of instance "main". A non-nil spoil changes the
// answers.
func serve(t *testing.T, spoil spoiler) (address string, store *castest.Memory) {
	t.Helper()
	instances := castest.Instances()
	in := must.Get(instances("main"))(t)
	var options []grpc.ServerOption
	if spoil != nil {
		options = append(options,
			grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				answer, err := next(ctx, req)
				if err == nil {
					spoil(answer.(proto.Message))
				}
				return answer, err
			}),
			grpc.ChainStreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
				return next(srv, &spoiled{s, spoil})
			}))
	}
	address = grpctest.Serve(t, func(s *grpc.Server) {
		casserver.Register(s, casserver.Config{Instances: instances})
	}, options...)
	return "grpc://" + address + "/main", in.Store.(*castest.Memory)
}

type spoiled struct {
	grpc.ServerStream
	spoil spoiler
}

func (s *spoiled) SendMsg(m any) error {
	// The server may send a wrapper of the message.
	s.spoil(m.(proto.Message).ProtoReflect().Interface())
	return s.ServerStream.SendMsg(m)
}

// small returns a short load with all steps.
func small() load.Config {
	return load.Config{
		Salt: "salt", Blobs: 100, Size: 1500, Large: 5 << 19, Lookups: 1000, Parallel: 3, Rounds: 2, Compressed: true,
	}
}

func dial(t *testing.T, name, address string) *load.Server {
	t.Helper()
	s := must.Get(load.Dial(t.Context(), name, address))(t)
	t.Cleanup(func() { s.Close() })
	return s
}

// steps are the steps for every server.
var steps = []string{
	"small batch write", "small batch read", "small stream write", "small stream read", "find missing",
	"large stream write", "large stream read", "large compressed read",
}

// TestStepsAreSkipped checks that numbers of 0 skip their steps.
func TestStepsAreSkipped(t *testing.T) {
	address, _ := serve(t, nil)
	c := small()
	c.Lookups, c.Large, c.Rounds = 0, 0, 1
	report := must.Get(load.Run(t.Context(), c, []*load.Server{dial(t, "", address)}))(t)
	var got []string
	for _, s := range report.Servers[0].Steps {
		got = append(got, s.Step)
	}
	expect.Slices(t, got, steps[:4], "steps")
}

func TestRunDoesEveryStepOnEveryServer(t *testing.T) {
	one, first := serve(t, nil)
	two, second := serve(t, nil)
	servers := []*load.Server{dial(t, "one", one), dial(t, "two", two)}
	c := small()
	rounds := 0
	c.Progress = func(round int) {
		if rounds++; round != rounds {
			t.Errorf("Progress: got round %d, want %d", round, rounds)
		}
	}
	report := must.Get(load.Run(t.Context(), c, servers))(t)
	// Batched, streamed, and a large one; the blobs of all rounds differ.
	if want := c.Rounds * (2*c.Blobs + 1); first.Len() != want || !slices.Equal(first.Digests(), second.Digests()) {
		t.Errorf("the servers store %d and %d blobs, want the same %d", first.Len(), second.Len(), want)
	}
	expect.Equal(t, rounds, c.Rounds, "Progress was called N times")
	for i, r := range report.Servers {
		var names []string
		for _, m := range r.Steps {
			names = append(names, m.Step)
			expect.That(t, len(m.Rates) == c.Rounds && slices.Min(m.Rates) > 0,
				"%s: %s: got rates %v, want %d positive ones", r.Name, m.Step, m.Rates, c.Rounds)
		}
		expect.That(t, r.Name == servers[i].Name && slices.Equal(names, steps),
			"%s: got steps %q, want %q", r.Name, names, steps)
	}
}

// TestServersAlternate checks that servers alternate step by step, and that each round begins with another one.
func TestServersAlternate(t *testing.T) {
	var mu sync.Mutex
	var order []string
	note := func(name string) spoiler {
		return func(answer proto.Message) {
			mu.Lock()
			defer mu.Unlock()
			switch answer.(type) {
			case *repb.BatchUpdateBlobsResponse:
				order = append(order, name+" writes")
			case *repb.BatchReadBlobsResponse:
				order = append(order, name+" reads")
			}
		}
	}
	one, _ := serve(t, note("one"))
	two, _ := serve(t, note("two"))
	must.Get(load.Run(t.Context(), small(), []*load.Server{dial(t, "one", one), dial(t, "two", two)}))(t)
	want := []string{
		"one writes", "two writes", "one reads", "two reads", "two writes", "one writes", "two reads", "one reads",
	}
	expect.Slices(t, order, want)
}

func TestBlobsAreHalfCompressible(t *testing.T) {
	address, store := serve(t, nil)
	c := small()
	c.Rounds = 1
	must.Get(load.Run(t.Context(), c, []*load.Server{dial(t, "one", address)}))(t)
	e := must.Get(zstd.NewWriter(nil))(t)
	defer e.Close()
	for _, d := range store.Digests() {
		if d.Size() != c.Large {
			continue
		}
		b := must.Get(io.ReadAll(must.Get(store.Open(t.Context(), d, 0))(t)))(t)
		if n := len(e.EncodeAll(b, nil)); n < len(b)*4/10 || n > len(b)*6/10 {
			t.Errorf("%d bytes compress to %d, want 40 to 60 %%", len(b), n)
		}
		return
	}
	t.Errorf("the server stores no blob of %d bytes", c.Large)
}

func TestStepsCanBeSkipped(t *testing.T) {
	for name, change := range map[string]func(*load.Config){
		"small": func(c *load.Config) { c.Blobs = 0 },
		"large": func(c *load.Config) { c.Large = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			address, _ := serve(t, nil)
			c := small()
			change(&c)
			report := must.Get(load.Run(t.Context(), c, []*load.Server{dial(t, "one", address)}))(t)
			if n := len(report.Servers[0].Steps); n == 0 || n == len(steps) {
				t.Errorf("got %d of %d steps, want some but not all", n, len(steps))
			}
			for _, m := range report.Servers[0].Steps {
				expect.That(t, !strings.HasPrefix(m.Step, name), "%s was not skipped", m.Step)
			}
		})
	}
}

// TestWrongAnswersAreFound spoils the answers of one method.
func TestWrongAnswersAreFound(t *testing.T) {
	failed := &rpcpb.Status{Code: int32(codes.ResourceExhausted), Message: "no room"}
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd} // begins a Zstandard frame (RFC 8878)
	other := must.Get(zstd.NewWriter(nil))(t).EncodeAll(make([]byte, 1<<20), nil)
	for _, c := range []struct {
		name  string
		spoil spoiler
		want  string
	}{
		{"BatchUpdateFails", on(func(m *repb.BatchUpdateBlobsResponse) { m.Responses[7].Status = failed }), "small batch write: .*no room"},
		{"BatchUpdateLacksOne", on(func(m *repb.BatchUpdateBlobsResponse) { m.Responses = m.Responses[1:] }), "small batch write: .*lacks 1"},
		{"BatchReadFails", on(func(m *repb.BatchReadBlobsResponse) { m.Responses[7].Status = failed }), "small batch read: .*no room"},
		{"BatchReadTwice", on(func(m *repb.BatchReadBlobsResponse) { m.Responses[1] = m.Responses[0] }), "small batch read: .*twice"},
		{"BatchReadOtherBytes", on(func(m *repb.BatchReadBlobsResponse) { m.Responses[3].Data = make([]byte, 1500) }), "small batch read: .*other bytes"},
		{"WriteCommitsLess", on(func(m *bspb.WriteResponse) { m.CommittedSize-- }), "small stream write: .*committed 1499"},
		{"ReadOtherBytes", on(func(m *bspb.ReadResponse) { m.Data = make([]byte, len(m.Data)) }), "small stream read: .*other bytes"},
		{"ReadLess", on(func(m *bspb.ReadResponse) { m.Data = m.Data[:len(m.Data)-1] }), "small stream read: .*last 1 bytes are missing"},
		{"ReadLargeLess", on(func(m *bspb.ReadResponse) {
			if len(m.Data) > 1500 {
				m.Data = m.Data[1:]
			}
		}), "large stream read: .*other bytes"},
		{"ReadLargeOtherBytes", on(func(m *bspb.ReadResponse) {
			if len(m.Data) > 1500 {
				m.Data = make([]byte, len(m.Data))
			}
		}), "large stream read: .*other bytes"},
		{"ReadCompressedOtherBytes", on(func(m *bspb.ReadResponse) {
			if bytes.HasPrefix(m.Data, frame) {
				m.Data = other
			}
		}), "large compressed read: .*other bytes"},
		{"ReadCompressedLess", on(func(m *bspb.ReadResponse) {
			if bytes.HasPrefix(m.Data, frame) {
				m.Data = m.Data[:4]
			}
		}), "large compressed read: "},
		{"FindMissingTooMany", on(func(m *repb.FindMissingBlobsResponse) {
			m.MissingBlobDigests[0] = &repb.Digest{Hash: strings.Repeat("0", 64), SizeBytes: 1500}
		}), "find missing: .*was written"},
		{"FindMissingTooFew", on(func(m *repb.FindMissingBlobsResponse) { m.MissingBlobDigests = m.MissingBlobDigests[1:] }), "find missing: 99 blobs .* want 100"},
	} {
		t.Run(c.name, func(t *testing.T) {
			address, _ := serve(t, c.spoil)
			config := small()
			config.Rounds = 1
			_, err := load.Run(t.Context(), config, []*load.Server{dial(t, "one", address)})
			expect.That(t, err != nil && regexp.MustCompile("^one: "+c.want).MatchString(err.Error()),
				"got %v, want one: %s", err, c.want)
		})
	}
}

func TestFailedCallsAreFound(t *testing.T) {
	stores := make(chan *castest.Memory, 1)
	address, store := serve(t, on(func(*bspb.WriteResponse) {
		s := <-stores
		defer func() { stores <- s }()
		for _, d := range s.Digests() {
			s.Delete(d)
		}
	}))
	stores <- store
	_, err := load.Run(t.Context(), small(), []*load.Server{dial(t, "one", address)})
	expect.That(t, status.Code(err) == codes.NotFound && strings.HasPrefix(err.Error(), "one: small stream read: "),
		"got %v, want NotFound in small stream read", err)
}

func TestRunEndsWithItsContext(t *testing.T) {
	address, _ := serve(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	c := small()
	c.Progress = func(round int) {
		if round == 2 {
			cancel()
		}
	}
	if _, err := load.Run(ctx, c, []*load.Server{dial(t, "one", address)}); err == nil || ctx.Err() == nil {
		t.Errorf("got %v after the second round was cancelled, want an error", err)
	}
}

func TestAddresses(t *testing.T) {
	address, _ := serve(t, nil)
	for _, good := range []string{address, strings.TrimSuffix(address, "/main"), strings.TrimPrefix(address, "grpc://")} {
		dial(t, "good", good)
	}
	for _, bad := range []string{"", "localhost", "http://127.0.0.1:80", "grpcs://127.0.0.1", ":80", "127.0.0.1:"} {
		if s, err := load.Dial(t.Context(), "bad", bad); !errors.Is(err, load.ErrAddress) {
			t.Errorf("Dial %q: got %v, %v, want ErrAddress", bad, s, err)
		}
	}
}

func TestWatchNeedsAProcess(t *testing.T) {
	address, _ := serve(t, nil)
	expect.That(t, dial(t, "one", address).Watch(1<<30) != nil, "Watch of a process that does not exist: got no error")
}

func TestReportText(t *testing.T) {
	measure := func(step, unit string, rate float64, cpus ...float64) load.Measure {
		return load.Measure{Step: step, Unit: unit, Rates: []float64{rate}, CPUs: cpus}
	}
	r := load.Report{Servers: []load.Result{
		{Name: "one", Watched: true, PeakRSS: 100 << 20, Steps: []load.Measure{
			measure("small batch write", "blobs", 20_000, 0.5), measure("large stream read", "bytes", 512<<20, 0.25),
		}},
		{Name: "two", Steps: []load.Measure{
			measure("small batch write", "blobs", 5_000), measure("large stream read", "bytes", 1<<30),
		}},
	}}
	var out strings.Builder
	must.Succeed(t, r.Text(&out))
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"one two",
		"small batch write 20000 /s 5000 /s 4.00x",
		"large stream read 512 MiB/s 1024 MiB/s 0.50x",
		"CPU of small batch write 0.50 s -",
		"CPU of large stream read 0.25 s -",
		"peak memory 100 MiB -",
	}
	expect.Slices(t, got, want)
}
