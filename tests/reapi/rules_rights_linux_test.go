// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/ca"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
)

// secured starts a server with the authority's certificates and callers, which are lines of a callers file; without any
// it has no callers file. It returns a function that connects to it, with a certificate and a token unless they are "".
func (c *client) secured(a *ca.Authority, flags []string, callers ...string) (address string, guest func(name, token string) *client) {
	c.Helper()
	a.Sign("server")
	args := append([]string{
		"--tls-cert", a.File("server.pem"), "--tls-key", a.File("server.key"), "--tls-client-ca", a.File("ca.pem"),
	}, flags...)
	if len(callers) > 0 {
		text := "version: 1\ncallers:\n" + strings.Join(callers, "\n") + "\n"
		args = append(args, "--auth", a.Write("auth.yaml", []byte(text)))
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	dir := c.TempDir()
	s := must.Get(bazelrun.StartServer(ctx, bazelrun.ServerConfig{
		Binary: built.Path(c.TB), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", Toolchain: declaredToolchain, Args: args,
	}))(c)
	c.Cleanup(func() { must.Succeed(c, s.Stop()) })
	return s.Addr, func(name, token string) *client {
		g := over(c.TB, a.Dial(s.Addr, name, token))
		g.ours, g.instance = true, "main"
		expect.Error(c, g.getCapabilities(c.Context()), nil)
		return g
	}
}

func callersRights(c *client) {
	a := ca.New(c.TB, c.TempDir())
	a.Sign("reader")
	a.Sign("stranger")
	token := func(name, rights string) string {
		sum := sha256.Sum256([]byte(name + "-token"))
		return fmt.Sprintf("  - {name: %s, token_sha256: %x, rights: [%s]}", name, sum, rights)
	}
	address, guest := c.secured(a, nil,
		"  - {name: reader, certificate: {subject: reader}, rights: [read]}",
		"  - {name: builder, jwt: {keys: keys.pem, issuer: conformance}, rights: [read, write, {execute: [main, team/*]}]}",
		token("uploader", "read, write"), token("recorder", "read, {cache: main}"))
	end := time.Now().Add(time.Hour).Unix()
	signed := func(issuer string, end int64) *client {
		return guest("", a.Token(map[string]any{"iss": issuer, "exp": end}))
	}
	builder := signed("conformance", end)
	d := builder.prepare(job{steps: []string{"say x"}})
	ran := builder.request(d, nil)
	builder.wantSuccess("an action of a caller with permission", ran)

	const ok, denied, unknown = codes.OK, codes.PermissionDenied, codes.Unauthenticated
	for name, g := range map[string]struct {
		*client
		reads, writes, caches, executes codes.Code
	}{
		"reader":                      {guest("reader", ""), ok, denied, denied, denied},
		"builder":                     {builder, ok, ok, denied, ok},
		"uploader":                    {guest("", "uploader-token"), ok, ok, denied, denied},
		"recorder":                    {guest("", "recorder-token"), ok, denied, ok, denied},
		"nobody":                      {guest("", ""), unknown, unknown, unknown, unknown},
		"stranger":                    {guest("stranger", ""), unknown, unknown, unknown, unknown},
		"a wrong token":               {guest("", "uploader-tokem"), unknown, unknown, unknown, unknown},
		"a certificate and bad token": {guest("reader", "x"), unknown, unknown, unknown, unknown},
		"an old token":                {signed("conformance", end-7200), unknown, unknown, unknown, unknown},
		"a token of another issuer":   {signed("somebody", end), unknown, unknown, unknown, unknown},
	} {
		_, err := g.update()
		g.wantCode(name+": BatchUpdateBlobs", err, g.writes)
		x := &repb.ActionResult{StdoutRaw: []byte("x")}
		g.wantCode(name+": UpdateActionResult", g.record(absentDigest(10), x), g.caches)
		g.wantCode(name+": Execute", g.request(d, nil).err, g.executes)
		g.wantCode(name+": WaitExecution", g.waitExecution(ran.name()).err, g.executes)
		_, err = g.recorded(d)
		g.wantCode(name+": GetActionResult", err, g.reads)
		_, _, err = g.read(g.readName(d), 0, 0)
		g.wantCode(name+": ByteStream.Read", err, g.reads)
		_, err = g.serving("")
		g.wantCode(name+": health", err, ok)
		expect.Equal(g, g.caps.GetExecutionCapabilities().GetExecEnabled(), g.executes == ok, "%s: exec_enabled", name)
		expect.Equal(g, updates.met(g.client), g.caches == ok, "%s: update_enabled", name)
	}
	recorder := guest("", "recorder-token")
	builder.instance, recorder.instance = "elsewhere", "elsewhere"
	builder.wantCode("Execute in an instance without permission", builder.request(d, nil).err, denied)
	recorder.wantCode("UpdateActionResult in an instance without permission",
		recorder.record(d, &repb.ActionResult{StdoutRaw: []byte("x")}), denied)
	_, err := dial(c.TB, address).serving("")
	c.wantCode("health without TLS", err, codes.Unavailable)
}

// TestRule131_CertificatesAlone checks that without a callers file clients with a certificate may do everything, and
// others cannot connect.
func TestRule131_CertificatesAlone(t *testing.T) {
	confined(t)
	a := ca.New(t, t.TempDir())
	a.Sign("anybody")
	address, guest := (&client{TB: t}).secured(a, nil)
	if g := guest("anybody", ""); !execution.met(g) || !updates.met(g) {
		t.Errorf("got capabilities %v, want exec_enabled and update_enabled", g.caps)
	}
	nobody := over(t, a.Dial(address, "", ""))
	_, err := nobody.serving("")
	nobody.wantCode("health without a certificate", err, codes.Unavailable)
}
