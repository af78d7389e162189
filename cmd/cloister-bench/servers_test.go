// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/pflag"
)

// TestEachServerGetsItsOwnToken checks that a separate store does not receive the token of the server.
func TestEachServerGetsItsOwnToken(t *testing.T) {
	t.Setenv("CLOISTER_TOKEN", "one")
	for variable, want := range map[string]string{"": "", "two": "Bearer two"} {
		t.Setenv("CLOISTER_CAS_TOKEN", variable)
		server, _ := grpctest.Authorization(t)
		storage, atStorage := grpctest.Authorization(t)
		var p serverFlags
		f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
		p.register(f, "")
		p.registerStores(f)
		must.Succeed(t, f.Parse([]string{"--executor", server, "--cas", storage}))
		expect.Equal(t, atStorage(p.storeCredentials(server, storage).DialOptions("grpc://"+storage)), want,
			"separate store: token")
		same, atSame := grpctest.Authorization(t)
		got := atSame(p.storeCredentials("grpc://"+same, same+"/main").DialOptions("grpc://" + same))
		expect.Equal(t, got, "Bearer "+cmp.Or(variable, "one"), "token of the store of the same server")
	}
}
