// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// must fails the test for errors that only a broken machine causes.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// An authority signs certificates and keeps them as files in a directory.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t.TempDir(), nil, must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert = must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key))))
	a.write(t, "ca.pem", "CERTIFICATE", a.cert.Raw)
	return a
}

// file returns the path of one of the authority's files.
func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) write(t *testing.T, name, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(a.file(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// sign writes NAME.pem and NAME.key, a certificate for NAME on this host.
func (a *authority) sign(t *testing.T, name string) {
	t.Helper()
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: must(rand.Int(rand.Reader, big.NewInt(1<<62))), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	a.write(t, name+".pem", "CERTIFICATE", must(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)))
	a.write(t, name+".key", "PRIVATE KEY", must(x509.MarshalPKCS8PrivateKey(key)))
}

// text writes a file into the authority's directory and returns its path.
func (a *authority) text(t *testing.T, name, text string) string {
	t.Helper()
	if err := os.WriteFile(a.file(name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return a.file(name)
}

// A guest is a client with some credential or none.
type guest struct {
	*grpc.ClientConn
	ctx context.Context
}

// guest connects to a server, with the certificate NAME unless that is "", and with a token, as Bazel's --remote_header sends
// it, unless that is "".
func (a *authority) guest(t *testing.T, address, name, token string) *guest {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	config := &tls.Config{RootCAs: pool}
	if name != "" {
		config.Certificates = []tls.Certificate{must(tls.LoadX509KeyPair(a.file(name+".pem"), a.file(name+".key")))}
	}
	conn := must(grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(config))))
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	return &guest{conn, ctx}
}

// put uploads a message to an instance.
func (g *guest) put(instance string, m proto.Message) (*repb.Digest, error) {
	data := must(proto.Marshal(m))
	d := cas.SHA256.Sum(data).Proto()
	r, err := repb.NewContentAddressableStorageClient(g).BatchUpdateBlobs(g.ctx, &repb.BatchUpdateBlobsRequest{
		InstanceName: instance, Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d, Data: data}},
	})
	if err == nil {
		err = status.ErrorProto(r.Responses[0].Status)
	}
	return d, err
}

// execute executes an action and returns the operation's name and response.
func (g *guest) execute(instance string, action *repb.Digest) (string, *repb.ExecuteResponse, error) {
	s, err := repb.NewExecutionClient(g).Execute(g.ctx, &repb.ExecuteRequest{InstanceName: instance, ActionDigest: action})
	for err == nil {
		op, e := s.Recv()
		if err = e; err == nil && op.Done {
			var r repb.ExecuteResponse
			return op.Name, &r, op.GetResponse().UnmarshalTo(&r)
		}
	}
	return "", nil, err
}

// recall looks up a result.
func (g *guest) recall(instance string, action *repb.Digest) error {
	_, err := repb.NewActionCacheClient(g).GetActionResult(g.ctx, &repb.GetActionResultRequest{InstanceName: instance, ActionDigest: action})
	return err
}

// record writes a result.
func (g *guest) record(instance string, action *repb.Digest) error {
	_, err := repb.NewActionCacheClient(g).UpdateActionResult(g.ctx, &repb.UpdateActionResultRequest{
		InstanceName: instance, ActionDigest: action, ActionResult: &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: "guest"}},
	})
	return err
}

// TestRule001_005_006_065_131_Rights tests a server with TLS and callers from its clients' side.
func TestRule001_005_006_065_131_Rights(t *testing.T) {
	a := newAuthority(t)
	for _, name := range []string{"server", "reader", "stranger"} {
		a.sign(t, name)
	}
	callers := "version: 1\ncallers:\n  - {name: reader, certificate: {subject: reader}, rights: [read]}\n"
	for name, rights := range map[string]string{
		"ci": "[read, write, {execute: [main, team/*]}]", "uploader": "[read, write]", "recorder": "[{cache: main}]",
	} {
		callers += fmt.Sprintf("  - {name: %s, token_sha256: %x, rights: %s}\n", name, sha256.Sum256([]byte(name+"-token")), rights)
	}
	s, _, log := start(t, "--tls-cert", a.file("server.pem"), "--tls-key", a.file("server.key"), "--tls-client-ca", a.file("ca.pem"),
		"--auth", a.text(t, "auth.yaml", callers))
	stopped := false
	stop := func() {
		if err := s.Stop(); err != nil && !stopped {
			t.Error(err)
		}
		stopped = true
	}
	t.Cleanup(func() {
		if !stopped {
			stop()
		}
	})
	ci, uploader := a.guest(t, s.Addr, "", "ci-token"), a.guest(t, s.Addr, "", "uploader-token")
	recorder, reader := a.guest(t, s.Addr, "", "recorder-token"), a.guest(t, s.Addr, "reader", "")

	command, err := ci.put("main", &repb.Command{Arguments: []string{"/bin/true"}})
	if err != nil {
		t.Fatal(err)
	}
	root, err := ci.put("main", &repb.Directory{})
	if err != nil {
		t.Fatal(err)
	}
	action, err := ci.put("main", &repb.Action{CommandDigest: command, InputRootDigest: root})
	if err != nil {
		t.Fatal(err)
	}
	other := cas.SHA256.Sum([]byte("another action")).Proto()

	// Capabilities match the callers' rights.
	for name, c := range map[string]struct {
		*guest
		execute, record bool
	}{"ci": {ci, true, false}, "uploader": {uploader, false, false}, "recorder": {recorder, false, true}, "reader": {reader, false, false}} {
		caps, err := repb.NewCapabilitiesClient(c).GetCapabilities(c.ctx, &repb.GetCapabilitiesRequest{InstanceName: "main"})
		if err != nil {
			t.Fatalf("%s: capabilities: got %v, want none", name, err)
		}
		if got := caps.ExecutionCapabilities.GetExecEnabled(); got != c.execute {
			t.Errorf("%s: got exec_enabled %t, want %t", name, got, !got)
		}
		if got := caps.CacheCapabilities.ActionCacheUpdateCapabilities.GetUpdateEnabled(); got != c.record {
			t.Errorf("%s: got update_enabled %t, want %t", name, got, !got)
		}
		if err := c.guest.record("main", other); status.Code(err) != map[bool]codes.Code{true: codes.OK, false: codes.PermissionDenied}[c.record] {
			t.Errorf("%s: write a result: got %v", name, err)
		}
		_, _, err = c.guest.execute("main", action)
		if status.Code(err) != map[bool]codes.Code{true: codes.OK, false: codes.PermissionDenied}[c.execute] {
			t.Errorf("%s executes: %v", name, err)
		}
	}

	// Execution records its result although the client may not.
	name, response, err := ci.execute("main", action)
	if err != nil || response.Result.GetExitCode() != 0 || response.Status.GetCode() != 0 {
		t.Fatalf("got response %v, %v, want exit code 0", response, err)
	}
	if err := reader.recall("main", action); err != nil {
		t.Errorf("read the result of the execution: got %v, want no error", err)
	}
	for caller, want := range map[*guest]codes.Code{ci: codes.OK, uploader: codes.PermissionDenied} {
		w, err := repb.NewExecutionClient(caller).WaitExecution(caller.ctx, &repb.WaitExecutionRequest{Name: name})
		if err == nil {
			_, err = w.Recv()
		}
		if status.Code(err) != want {
			t.Errorf("WaitExecution: got %v, want %v", err, want)
		}
	}
	for what, err := range map[string]error{
		"execute in another instance":       func() error { _, _, err := ci.execute("other", action); return err }(),
		"record in another instance":        recorder.record("other", action),
		"upload as one who records":         func() error { _, err := recorder.put("main", &repb.Directory{}); return err }(),
		"upload as one who reads":           func() error { _, err := reader.put("main", &repb.Directory{}); return err }(),
		"look results up as one who writes": recorder.recall("main", action),
	} {
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v", what, err)
		}
	}

	// Missing, unknown and forged credentials.
	for what, g := range map[string]*guest{
		"nothing": a.guest(t, s.Addr, "", ""), "a wrong token": a.guest(t, s.Addr, "", "ci-tokem"),
		"a wrong token with a good certificate": a.guest(t, s.Addr, "reader", "x"), "a certificate of nobody": a.guest(t, s.Addr, "stranger", ""),
	} {
		if _, err := repb.NewCapabilitiesClient(g).GetCapabilities(g.ctx, &repb.GetCapabilitiesRequest{}); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: %v", what, err)
		}
		if _, _, err := g.execute("main", action); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s executes: %v", what, err)
		}
		if _, err := healthpb.NewHealthClient(g).Check(g.ctx, &healthpb.HealthCheckRequest{}); err != nil {
			t.Errorf("health with %s: got %v, want no error", what, err)
		}
	}
	plain := must(grpc.NewClient("passthrough:///"+s.Addr, grpc.WithTransportCredentials(insecure.NewCredentials())))
	defer plain.Close()
	if _, err := healthpb.NewHealthClient(plain).Check(ci.ctx, &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("without TLS: got %v, want an error", err)
	}

	// Cloister's own commands.
	token := a.text(t, "token", "ci-token\n")
	show := []string{"action", "show", fmt.Sprintf("%s/%d", action.Hash, action.SizeBytes), "--instance", "main", "--cas", "grpcs://" + s.Addr, "--tls-ca", a.file("ca.pem")}
	for what, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"a token":          {append(show, "--token-file", token), 0, "/bin/true"},
		"a certificate":    {append(show, "--tls-cert", a.file("reader.pem"), "--tls-key", a.file("reader.key")), 0, "/bin/true"},
		"nothing":          {show, 1, "no credential"},
		"no authority":     {append(show[:len(show)-2:len(show)-2], "--token-file", token), 5, "certificate"},
		"a log":            {append([]string{"action", "log"}, append(show[2:len(show):len(show)], "--token-file", token)...), 0, ""},
		"a log for nobody": {append([]string{"action", "log"}, show[2:]...), 1, "no credential"},
		"half of a pair":   {append(show, "--tls-cert", a.file("reader.pem")), 2, "go together"},
		"a token to read":  {[]string{"cas", "stat", strings.Repeat("a", 64) + "/1", "--instance", "main", "--cas", "grpcs://" + s.Addr, "--tls-ca", a.file("ca.pem"), "--token-file", token}, 4, "absent"},
	} {
		if got := cloister(t, "", c.args...); got.code != c.code || !strings.Contains(got.out+got.err, c.says) {
			t.Errorf("%s: got %+v", what, got)
		}
	}

	// A server with this one as its upstream.
	front := serving(t, "main", "--cas", "grpcs://"+s.Addr, "--cas-tls-ca", a.file("ca.pem"), "--cas-token-file", token)
	d, err := front.WriteBlob(t.Context(), []byte("through the front"))
	if err != nil {
		t.Fatal(err)
	}
	missing, err := repb.NewContentAddressableStorageClient(reader).FindMissingBlobs(reader.ctx,
		&repb.FindMissingBlobsRequest{InstanceName: "main", BlobDigests: []*repb.Digest{d.ToProto()}})
	if err != nil || len(missing.MissingBlobDigests) != 0 {
		t.Errorf("blob written through the front server: got missing %v, %v, want none", missing, err)
	}

	// The next connection uses a renewed certificate.
	serial := func() string {
		pool := x509.NewCertPool()
		pool.AddCert(a.cert)
		c := must(tls.Dial("tcp", s.Addr, &tls.Config{RootCAs: pool, NextProtos: []string{"h2"}}))
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	before := serial()
	a.sign(t, "server")
	later := time.Now().Add(time.Hour) // independent of the file system's time resolution
	for _, name := range []string{"server.pem", "server.key"} {
		if err := os.Chtimes(a.file(name), later, later); err != nil {
			t.Fatal(err)
		}
	}
	if after := serial(); after == before {
		t.Error("got the old certificate, want the renewed one")
	}
	if err := reader.recall("main", action); err != nil {
		t.Errorf("connection from before the renewal: got %v, want no error", err)
	}

	stop()
	text := log.String()
	for _, want := range []string{"access   TLS, 4 callers of " + a.file("auth.yaml"), "--remote_executor=grpcs://" + s.Addr} {
		if !strings.Contains(text, want) {
			t.Errorf("got log\n%s\nwant %q in it", text, want)
		}
	}
	for _, secret := range []string{"-token\"", "ci-token", "ci-tokem", "uploader-token", "recorder-token"} {
		if strings.Contains(text, secret) {
			t.Errorf("got a token in the log\n%s", text)
		}
	}
}

// TestRule131_CertificatesAlone checks that without a callers file clients with a certificate may do everything and others cannot
// connect.
func TestRule131_CertificatesAlone(t *testing.T) {
	a := newAuthority(t)
	a.sign(t, "server")
	a.sign(t, "anybody")
	s, _, _ := start(t, "--tls-cert", a.file("server.pem"), "--tls-key", a.file("server.key"), "--tls-client-ca", a.file("ca.pem"))
	defer s.Stop()
	caps, err := repb.NewCapabilitiesClient(a.guest(t, s.Addr, "anybody", "")).GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{})
	if err != nil || !caps.ExecutionCapabilities.ExecEnabled || !caps.CacheCapabilities.ActionCacheUpdateCapabilities.UpdateEnabled {
		t.Errorf("got capabilities %v, %v, want execution enabled", caps, err)
	}
	if _, err := healthpb.NewHealthClient(a.guest(t, s.Addr, "", "")).Check(t.Context(), &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("without a certificate: got %v, want an error", err)
	}
}

// TestTokenIsReplacedWithoutARestart checks that both the old and the new token work while the callers file contains both.
func TestTokenIsReplacedWithoutARestart(t *testing.T) {
	a := newAuthority(t)
	a.sign(t, "server")
	of := func(token string) string {
		return fmt.Sprintf("version: 1\ncallers:\n  - {name: ci, token_sha256: %x, rights: [read]}\n", sha256.Sum256([]byte(token)))
	}
	file := a.text(t, "auth.yaml", of("old"))
	s, _, log := start(t, "--tls-cert", a.file("server.pem"), "--tls-key", a.file("server.key"), "--auth", file)
	defer s.Stop()
	before, after := a.guest(t, s.Addr, "", "old"), a.guest(t, s.Addr, "", "new")
	ask := func(g *guest) codes.Code {
		_, err := repb.NewCapabilitiesClient(g).GetCapabilities(g.ctx, &repb.GetCapabilitiesRequest{})
		return status.Code(err)
	}
	if got := [2]codes.Code{ask(before), ask(after)}; got != [2]codes.Code{codes.OK, codes.Unauthenticated} {
		t.Fatalf("with the first callers file: got %v", got)
	}
	if err := os.Rename(a.text(t, "auth.yaml.new", of("new")), file); err != nil {
		t.Fatal(err)
	}
	for ask(after) == codes.Unauthenticated { // for a second, at most for the lifetime of a guest
		time.Sleep(20 * time.Millisecond)
	}
	if got := [2]codes.Code{ask(before), ask(after)}; got != [2]codes.Code{codes.Unauthenticated, codes.OK} {
		t.Errorf("with the new callers file: got %v, log\n%s", got, log)
	}
}

// TestServeDoesNotStartUnguarded checks that a mistake in the files for authentication prevents the start and is reported.
func TestServeDoesNotStartUnguarded(t *testing.T) {
	a := newAuthority(t)
	a.sign(t, "server")
	pair := []string{"--tls-cert", a.file("server.pem"), "--tls-key", a.file("server.key")}
	token := fmt.Sprintf("version: 1\ncallers:\n  - {name: ci, token_sha256: %x, rights: [read]}\n", sha256.Sum256([]byte("x")))
	for _, c := range []struct {
		name, says string
		args       []string
	}{
		{"no key", "go together", pair[:2]},
		{"a key of another", "does not match", []string{"--tls-cert", a.file("ca.pem"), "--tls-key", a.file("server.key")}},
		{"no file", "no such file", append(pair, "--auth", "/nonexistent")},
		{"a misspelt right", "did you mean \"execute\"?", append(pair, "--auth", a.text(t, "bad.yaml", strings.Replace(token, "[read]", "[exceute]", 1)))},
		{"certificates without an authority", "--tls-client-ca", append(pair, "--auth", a.text(t, "cert.yaml", "version: 1\ncallers: [{name: c, certificate: {subject: c}, rights: [read]}]\n"))},
		{"an authority without TLS", "needs --tls-cert", []string{"--tls-client-ca", a.file("ca.pem")}},
		{"no authority in it", "no certificate", append(pair, "--tls-client-ca", a.file("server.key"))},
		{"a front without a server", "need --cas", []string{"--cas-token-file", a.text(t, "token", "x")}},
		{"a token in clear text", "clear text", []string{"--cas", "grpc://192.0.2.1:1", "--cas-token-file", a.file("token")}},
	} {
		got := cloister(t, "", append([]string{"serve", "--listen", "127.0.0.1:0", "--dir", t.TempDir()}, c.args...)...)
		if got.code != 2 || !strings.Contains(got.err, c.says) || strings.Contains(got.out, "--remote_executor") {
			t.Errorf("%s: got %+v, want exit code 2 and %q", c.name, got, c.says)
		}
	}
}
