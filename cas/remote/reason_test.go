// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestReason(t *testing.T) {
	for _, c := range []struct {
		code       codes.Code
		text, want string
	}{
		{codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`, "dial tcp 127.0.0.1:1: connect: connection refused"},
		{codes.Unavailable, `connection error: desc = "transport: authentication handshake failed: tls: \"x\" is no name"`, `authentication handshake failed: tls: "x" is no name`},
		{codes.Unavailable, `connection error: desc = "error reading server preface: EOF"`, "error reading server preface: EOF; if the server uses TLS, write grpcs://HOST:PORT"},
		{codes.Unavailable, `connection error: desc = "not ended`, `connection error: desc = "not ended`},
		{codes.Unavailable, `connection error: desc = "\x1b[2J"`, `\x1b[2J`},
		{codes.NotFound, `no worker is called "a"`, `no worker is called "a"`},
		{codes.Unavailable, "away\x1b[2J\n", `away\x1b[2J\n`},
	} {
		expect.Equal(t, remote.Reason(status.New(c.code, c.text)), c.want, "%v: %s", c.code, c.text)
	}
	if got := remote.Reason(status.New(codes.Internal, strings.Repeat("long ", 1000))); len(got) > 1000 {
		t.Errorf("a long text: %d bytes", len(got))
	}
}
