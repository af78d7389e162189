// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	headers "google.golang.org/grpc/metadata"
)

// An authority signs certificates and tokens and keeps them as files.
type authority struct {
	*client
	dir  string
	cert *x509.Certificate
	key  ed25519.PrivateKey
}

func (c *client) authority() *authority {
	c.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		c.Fatal(err)
	}
	a := &authority{client: c, dir: c.TempDir(), key: key}
	a.cert = a.certificate("authority", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		c.Fatal(err)
	}
	a.keep("keys.pem", "PUBLIC KEY", public)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) keep(name, kind string, der []byte) {
	a.Helper()
	if err := os.WriteFile(a.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.Fatal(err)
	}
}

// certificate writes NAME.pem and NAME.key, signed by a; the first one is the authority's own.
func (a *authority) certificate(name string, t *x509.Certificate) *x509.Certificate {
	a.Helper()
	t.SerialNumber, t.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	t.NotBefore, t.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	t.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	parent, key := a.cert, a.key
	if parent == nil {
		parent = t
	} else if _, fresh, err := ed25519.GenerateKey(rand.Reader); err != nil {
		a.Fatal(err)
	} else {
		key = fresh
	}
	der, err := x509.CreateCertificate(rand.Reader, t, parent, key.Public(), a.key)
	if err != nil {
		a.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.Fatal(err)
	}
	a.keep(name+".pem", "CERTIFICATE", der)
	a.keep(name+".key", "PRIVATE KEY", secret)
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.Fatal(err)
	}
	return cert
}

// token returns a JSON Web Token.
func (a *authority) token(claims map[string]any) string {
	a.Helper()
	encode := base64.RawURLEncoding.EncodeToString
	body, err := json.Marshal(claims)
	if err != nil {
		a.Fatal(err)
	}
	signed := encode([]byte(`{"alg":"EdDSA","typ":"JWT"}`)) + "." + encode(body)
	return signed + "." + encode(ed25519.Sign(a.key, []byte(signed)))
}

// guest returns a client of a TLS server, with the certificate NAME and the token, if they are not empty.
func (a *authority) guest(address, name, token string) *client {
	a.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	config := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	if name != "" {
		pair, err := tls.LoadX509KeyPair(a.path(name+".pem"), a.path(name+".key"))
		if err != nil {
			a.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	bearer := func(ctx context.Context) context.Context {
		if token == "" {
			return ctx
		}
		return headers.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return call(bearer(ctx), method, req, reply, cc, opts...)
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(bearer(ctx), desc, cc, method, opts...)
		}))
	if err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { conn.Close() })
	g := over(a.TB, conn)
	g.ours, g.instance = true, "main"
	return g
}

func callersRights(c *client) {
	a := c.authority()
	for _, name := range []string{"server", "reader", "stranger"} {
		a.certificate(name, &x509.Certificate{})
	}
	callers := fmt.Sprintf(`version: 1
callers:
  - {name: reader, certificate: {subject: reader}, rights: [read]}
  - {name: builder, jwt: {keys: keys.pem, issuer: conformance}, rights: [read, write, {execute: main}]}
  - {name: uploader, token_sha256: %x, rights: [read, write]}
  - {name: recorder, token_sha256: %x, rights: [read, cache]}
`, sha256.Sum256([]byte("uploader-token")), sha256.Sum256([]byte("recorder-token")))
	if err := os.WriteFile(a.path("auth.yaml"), []byte(callers), 0o600); err != nil {
		c.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	dir := c.TempDir()
	s, err := bazelrun.StartServer(ctx, bazelrun.ServerConfig{
		Binary: built.Path(c.TB), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0",
		Args: []string{
			"--tls-cert", a.path("server.pem"), "--tls-key", a.path("server.key"), "--tls-client-ca", a.path("authority.pem"), "--auth", a.path("auth.yaml"),
		},
	})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		if err := s.Stop(); err != nil {
			c.Error(err)
		}
	})
	end := time.Now().Add(time.Hour).Unix()
	builder := a.guest(s.Addr, "", a.token(map[string]any{"iss": "conformance", "exp": end}))
	action := builder.prepare(job{steps: []string{"say x"}})
	builder.wantSuccess("an action of a caller with permission", builder.request(action, nil))

	for name, g := range map[string]struct {
		*client
		write, cache, execute codes.Code
	}{
		"reader":   {a.guest(s.Addr, "reader", ""), codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
		"builder":  {builder, codes.OK, codes.PermissionDenied, codes.OK},
		"uploader": {a.guest(s.Addr, "", "uploader-token"), codes.OK, codes.PermissionDenied, codes.PermissionDenied},
		"recorder": {a.guest(s.Addr, "", "recorder-token"), codes.PermissionDenied, codes.OK, codes.PermissionDenied},
		"nobody":   {a.guest(s.Addr, "", ""), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated},
		"stranger": {a.guest(s.Addr, "stranger", ""), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated},
		"a wrong token": {
			a.guest(s.Addr, "", "uploader-tokem"), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated,
		},
		"an old token": {
			a.guest(s.Addr, "", a.token(map[string]any{"iss": "conformance", "exp": end - 7200})), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated,
		},
		"a token of another issuer": {
			a.guest(s.Addr, "", a.token(map[string]any{"iss": "somebody", "exp": end})), codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated,
		},
	} {
		_, err := g.cas.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{InstanceName: "main"})
		g.wantCode(name+": BatchUpdateBlobs", err, g.write)
		_, err = g.ac.UpdateActionResult(ctx, &repb.UpdateActionResultRequest{
			InstanceName: "main", ActionDigest: absentDigest(10), ActionResult: &repb.ActionResult{StdoutRaw: []byte("x")},
		})
		g.wantCode(name+": UpdateActionResult", err, g.cache)
		g.wantCode(name+": Execute", g.request(action, nil).err, g.execute)
		_, err = g.recorded(action)
		read := codes.OK
		if g.write == codes.Unauthenticated {
			read = codes.Unauthenticated
		}
		g.wantCode(name+": GetActionResult", err, read)
		r, err := g.bs.Read(ctx, &bspb.ReadRequest{ResourceName: fmt.Sprintf("main/blobs/%s/%d", action.Hash, action.SizeBytes)})
		if err == nil {
			_, err = r.Recv()
		}
		g.wantCode(name+": ByteStream.Read", err, read)
	}
	builder.instance = "elsewhere"
	builder.wantCode("Execute in an instance without permission", builder.request(action, nil).err, codes.PermissionDenied)
}
