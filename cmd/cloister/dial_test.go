// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// TestTokensAreNotSentInClearText: not to another host, wherever the token comes from, and no message repeats one.
func TestTokensAreNotSentInClearText(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret-token\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for address, good := range map[string]bool{
		"grpcs://build.example.com:443": true, "grpc://127.0.0.1:8980": true, "grpc://[::1]:8980/main": true, "grpc://localhost:8980": true,
		"grpc://build.example.com:8980": false, "grpc://10.0.0.1:8980": false, "grpc://127.0.0.1.example.com:1": false, "grpc://localhost@example.com:1": false, "": false,
	} {
		for _, variable := range []string{"", "secret-token"} {
			t.Setenv("CLOISTER_TOKEN", variable)
			i := &identity{from: "CLOISTER_TOKEN"}
			if variable == "" {
				i.token = file
			}
			options, err := i.options(address)
			if (err == nil) != good || good && len(options) == 0 {
				t.Errorf("%s: %d options, %v", address, len(options), err)
			}
			var e *exit
			if err != nil && (!errors.As(err, &e) || e.code != exitUsage || strings.Contains(err.Error(), "secret")) {
				t.Errorf("%s: %v", address, err)
			}
		}
	}
}

// keeper serves nothing, and remembers what header of authorization came last.
func keeper(t *testing.T) (address string, shown func(*identity) string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	headers := make(chan []string, 1)
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		md, _ := metadata.FromIncomingContext(stream.Context())
		headers <- md.Get("authorization")
		return status.Error(codes.Unimplemented, "nothing is served here")
	}))
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	address = listener.Addr().String()
	return address, func(i *identity) string {
		t.Helper()
		options, err := i.options("grpc://" + address)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(address, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)...)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unimplemented {
			t.Fatal(err)
		}
		return strings.Join(<-headers, ", ")
	}
}

// TestATokenIsForTheServerThatItWasNamedFor: of a worker's two servers each is shown its own, and none if there is none.
func TestATokenIsForTheServerThatItWasNamedFor(t *testing.T) {
	scheduler, atScheduler := keeper(t)
	storage, atStorage := keeper(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("of-the-file"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		flags            string
		token, casToken  string // variables
		shown, shownToIt string // to the scheduler, and to the store
	}{
		"one server":                {"", "one", "", "Bearer one", "Bearer one"},
		"one server, two tokens":    {"", "one", "two", "Bearer one", "Bearer two"},
		"one server, by a file":     {"--token-file " + file, "one", "", "Bearer of-the-file", "Bearer of-the-file"},
		"one server, named twice":   {"--cas grpc://" + scheduler + "/main", "one", "", "Bearer one", "Bearer one"},
		"one server, as two":        {"--cas grpc://" + scheduler, "one", "two", "Bearer one", "Bearer two"},
		"two servers":               {"--cas grpc://" + storage, "one", "", "Bearer one", ""},
		"two servers with tokens":   {"--cas grpc://" + storage, "one", "two", "Bearer one", "Bearer two"},
		"two servers, by a file":    {"--token-file " + file + " --cas grpc://" + storage, "", "", "Bearer of-the-file", ""},
		"a file of the store":       {"--cas-token-file " + file + " --cas grpc://" + storage, "one", "two", "Bearer one", "Bearer of-the-file"},
		"a file for the same again": {"--cas-token-file " + file + " --cas grpc://" + scheduler, "one", "", "Bearer one", "Bearer of-the-file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CLOISTER_TOKEN", c.token)
			t.Setenv("CLOISTER_CAS_TOKEN", c.casToken)
			join := joinConfig{nodeConfig: newNodeConfig(), scheduler: "grpc://" + scheduler}
			cmd := &cobra.Command{}
			join.register(cmd)
			if err := cmd.ParseFlags(strings.Fields(c.flags)); err != nil {
				t.Fatal(err)
			}
			if err := join.check(cmd); err != nil {
				t.Fatal(err)
			}
			if got := atScheduler(&join.who); got != c.shown {
				t.Errorf("the scheduler is shown %q, want %q", got, c.shown)
			}
			if got := atStorage(&join.far.who); got != c.shownToIt {
				t.Errorf("the store is shown %q, want %q", got, c.shownToIt)
			}
		})
	}
}

// TestBenchShowsEachServerItsToken: a store apart from the server that is measured is another server.
func TestBenchShowsEachServerItsToken(t *testing.T) {
	t.Setenv("CLOISTER_TOKEN", "one")
	for variable, want := range map[string]string{"": "", "two": "Bearer two"} {
		t.Setenv("CLOISTER_CAS_TOKEN", variable)
		server, _ := keeper(t)
		storage, atStorage := keeper(t)
		var p peers
		f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
		p.register(f, "")
		p.registerStores(f)
		if err := f.Parse([]string{"--executor", server, "--cas", storage}); err != nil {
			t.Fatal(err)
		}
		if got := atStorage(p.atStore(server, storage)); got != want {
			t.Errorf("the store is shown %q, want %q", got, want)
		}
		same, atSame := keeper(t)
		if got, want := atSame(p.atStore("grpc://"+same, same+"/main")), "Bearer "+cmp.Or(variable, "one"); got != want {
			t.Errorf("the server itself is shown %q, want %q", got, want)
		}
	}
}

// TestTokenFileIsReadAgain: tokens are renewed while a command runs.
func TestTokenFileIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	b := &bearer{file: file}
	for _, token := range []string{"one", "another"} {
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := b.GetRequestMetadata(t.Context())
		if err != nil || len(got) != 1 || got["authorization"] != "Bearer "+token {
			t.Errorf("got %v, %v, want %s", got, err, token)
		}
	}
	for _, bad := range []string{"", "two words", "line\nbreak", "\u00fcml\u00e4ut"} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := b.GetRequestMetadata(t.Context()); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: got %v, %v", bad, got, err)
		}
	}
}

// TestIdentityMistakes: flags that would not be used are refused, not ignored.
func TestIdentityMistakes(t *testing.T) {
	t.Setenv("CLOISTER_TOKEN", "")
	for name, c := range map[string]struct {
		i       identity
		address string
	}{
		"a certificate without a key":    {identity{cert: "c"}, "grpcs://h:1"},
		"a key without a certificate":    {identity{key: "c"}, "grpcs://h:1"},
		"authorities without TLS":        {identity{ca: "c"}, "grpc://h:1"},
		"a certificate without TLS":      {identity{cert: "c", key: "k"}, "grpc://h:1"},
		"authorities that are not there": {identity{ca: "/nonexistent"}, "grpcs://h:1"},
		"a pair that is not there":       {identity{cert: "/nonexistent", key: "/nonexistent"}, "grpcs://h:1"},
		"a token that is not there":      {identity{token: "/nonexistent"}, "grpcs://h:1"},
	} {
		var e *exit
		if _, err := c.i.options(c.address); !errors.As(err, &e) || e.code != exitUsage {
			t.Errorf("%s: %v", name, err)
		}
	}
	if options, err := (&identity{}).options("grpc://build.example.com:8980"); err != nil || len(options) != 0 {
		t.Errorf("without flags: %v, %v", options, err)
	}
}

// TestEveryDialShowsWhoCalls: no command dials a server without the flags of identity.
func TestEveryDialShowsWhoCalls(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	dials := 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			for _, call := range []string{"grpc.New" + "Client(", "remote." + "Dial(", "remote." + "New(", "load." + "Dial(", ".Dial" + "Store("} {
				if strings.HasSuffix(name, "_test.go") || !strings.Contains(line, call) {
					continue
				}
				if dials++; !strings.Contains(line, "options...") {
					t.Errorf("%s: %s: it dials without identity.options", name, strings.TrimSpace(line))
				}
			}
		}
	}
	if dials < 5 {
		t.Errorf("found %d dials only", dials)
	}
}
