// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/grpctest"
	"github.com/spf13/pflag"
)

// TestBenchShowsEachServerItsToken: a store apart from the server that is measured is another server.
func TestBenchShowsEachServerItsToken(t *testing.T) {
	t.Setenv("CLOISTER_TOKEN", "one")
	for variable, want := range map[string]string{"": "", "two": "Bearer two"} {
		t.Setenv("CLOISTER_CAS_TOKEN", variable)
		server, _ := grpctest.Authorization(t)
		storage, atStorage := grpctest.Authorization(t)
		var p peers
		f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
		p.register(f, "")
		p.registerStores(f)
		if err := f.Parse([]string{"--executor", server, "--cas", storage}); err != nil {
			t.Fatal(err)
		}
		if got := atStorage(p.atStore(server, storage).DialOptions("grpc://" + storage)); got != want {
			t.Errorf("the store is shown %q, want %q", got, want)
		}
		same, atSame := grpctest.Authorization(t)
		if got, want := atSame(p.atStore("grpc://"+same, same+"/main").DialOptions("grpc://"+same)), "Bearer "+cmp.Or(variable, "one"); got != want {
			t.Errorf("the server itself is shown %q, want %q", got, want)
		}
	}
}
