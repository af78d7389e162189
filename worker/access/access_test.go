// SPDX-License-Identifier: Apache-2.0

package access_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker/access"
	"github.com/cloister-build/cloister/worker/transport"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
)

// An authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // its certificate
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	cert := must.Get(x509.ParseCertificate(der))(t)
	a := &authority{t, cert, key, filepath.Join(t.TempDir(), "ca.pem")}
	write(t, a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return a
}

// sign writes a new certificate for template to files.
func (a *authority) sign(template x509.Certificate, certFile, keyFile string) {
	a.t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(a.t)
	serial := must.Get(rand.Int(rand.Reader, big.NewInt(1<<62)))(a.t)
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der := must.Get(x509.CreateCertificate(rand.Reader, &template, a.cert, &key.PublicKey, a.key))(a.t)
	secret := must.Get(x509.MarshalPKCS8PrivateKey(key))(a.t)
	write(a.t, certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	write(a.t, keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// pair returns the files of a new certificate for template.
func (a *authority) pair(template x509.Certificate) (cert, key string) {
	a.t.Helper()
	dir := a.t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a.sign(template, cert, key)
	return cert, key
}

func write(t *testing.T, name string, b []byte) {
	t.Helper()
	must.Succeed(t, os.WriteFile(name, b, 0o600))
}

func sum(token string) string {
	s := sha256.Sum256([]byte(token))
	return hex.EncodeToString(s[:])
}

func parse(t *testing.T, text string) *access.Rules {
	t.Helper()
	return must.Get(access.Parse(filepath.Join(t.TempDir(), "auth.yaml"), []byte(text)))(t)
}

// A server has all services over an in-memory store.
type server struct {
	*testing.T
	address string
	info    map[string]grpc.ServiceInfo
}

// execution is an Execution service that reports that a call was admitted.
type execution struct {
	repb.UnimplementedExecutionServer
	longrunningpb.UnimplementedOperationsServer
	logpb.UnimplementedLogStreamServiceServer
}

// A guard checks calls against rules or the current rules of a file.
type guard interface{ Options() []grpc.ServerOption }

// serve starts a server, with TLS if pair is not nil.
func serve(t *testing.T, rules guard, config *tls.Config) *server {
	t.Helper()
	g, _ := newServer(rules, config)
	return &server{t, grpctest.Listen(t, g), g.GetServiceInfo()}
}

// newServer returns a server that does not serve yet, and its health.
func newServer(rules guard, config *tls.Config) (*grpc.Server, *health.Server) {
	options := append(casserver.ServerOptions(slog.New(slog.DiscardHandler)), rules.Options()...)
	if config != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	g := grpc.NewServer(options...)
	casserver.Register(g, casserver.Config{
		Instances: castest.Instances(), Execution: &repb.ExecutionCapabilities{ExecEnabled: true}, Rights: new(access.Rules).Rights, // which looks at who was admitted
	})
	x := &execution{}
	repb.RegisterExecutionServer(g, x)
	longrunningpb.RegisterOperationsServer(g, x)
	logpb.RegisterLogStreamServiceServer(g, x)
	assetpb.RegisterFetchServer(g, &assetpb.UnimplementedFetchServer{})
	assetpb.RegisterPushServer(g, &assetpb.UnimplementedPushServer{})
	cloisterpb.RegisterHistoryServer(g, &cloisterpb.UnimplementedHistoryServer{})
	cloisterpb.RegisterBlobIndexServer(g, &cloisterpb.UnimplementedBlobIndexServer{})
	cloisterpb.RegisterBuildsServer(g, &cloisterpb.UnimplementedBuildsServer{})
	bespb.RegisterPublishBuildEventServer(g, &publishing{})
	cloisterpb.RegisterFleetServer(g, &cloisterpb.UnimplementedFleetServer{})
	alive := health.NewServer()
	healthpb.RegisterHealthServer(g, alive)
	reflection.Register(g)
	return g, alive
}

// publishing reads the first message, which decides about a stream.
type publishing struct {
	bespb.UnimplementedPublishBuildEventServer
}

func (*publishing) PublishBuildToolEventStream(s bespb.PublishBuildEvent_PublishBuildToolEventStreamServer) error {
	if _, err := s.Recv(); err != nil {
		return err
	}
	return status.Error(codes.NotFound, "no such build")
}

// dial returns a connection that sends an authorization header unless it is "".
func (s *server) dial(config *tls.Config, authorization string) *grpc.ClientConn {
	s.Helper()
	creds := insecure.NewCredentials()
	if config != nil {
		creds = credentials.NewTLS(config)
	}
	header := func(ctx context.Context) context.Context {
		if authorization == "" {
			return ctx
		}
		return metadata.AppendToOutgoingContext(ctx, "authorization", authorization)
	}
	conn, err := grpc.NewClient("passthrough:///"+s.address, grpc.WithTransportCredentials(creds),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
			return next(header(ctx), method, req, reply, cc, o...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, d *grpc.StreamDesc, cc *grpc.ClientConn, method string, next grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
			return next(header(ctx), d, cc, method, o...)
		}))
	must.Succeed(s, err)
	s.Cleanup(func() { conn.Close() })
	return conn
}

// blob is always present.
var blob = &repb.Digest{Hash: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}

// calls has a call of each method in an instance.
var calls = map[string]func(ctx context.Context, conn *grpc.ClientConn, instance string) error{
	"GetCapabilities": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewCapabilitiesClient(conn).GetCapabilities(ctx, &repb.GetCapabilitiesRequest{InstanceName: instance})
		return err
	},
	"FindMissingBlobs": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewContentAddressableStorageClient(conn).FindMissingBlobs(ctx,
			&repb.FindMissingBlobsRequest{InstanceName: instance, BlobDigests: []*repb.Digest{blob}})
		return err
	},
	"BatchReadBlobs": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewContentAddressableStorageClient(conn).BatchReadBlobs(ctx,
			&repb.BatchReadBlobsRequest{InstanceName: instance, Digests: []*repb.Digest{blob}})
		return err
	},
	"BatchUpdateBlobs": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewContentAddressableStorageClient(conn).BatchUpdateBlobs(ctx,
			&repb.BatchUpdateBlobsRequest{InstanceName: instance, Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: blob}}})
		return err
	},
	"GetTree": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := repb.NewContentAddressableStorageClient(conn).GetTree(ctx, &repb.GetTreeRequest{InstanceName: instance, RootDigest: blob})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"Read": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := bspb.NewByteStreamClient(conn).Read(ctx, &bspb.ReadRequest{ResourceName: under(instance, "blobs/"+blob.Hash+"/0")})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"Write": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := bspb.NewByteStreamClient(conn).Write(ctx)
		if err != nil {
			return err
		}
		// Recv returns the stream's error.
		_ = s.Send(&bspb.WriteRequest{ResourceName: under(instance, "uploads/x/blobs/"+blob.Hash+"/0"), FinishWrite: true})
		_, err = s.CloseAndRecv()
		return err
	},
	"QueryWriteStatus": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := bspb.NewByteStreamClient(conn).QueryWriteStatus(ctx,
			&bspb.QueryWriteStatusRequest{ResourceName: under(instance, "uploads/x/blobs/"+blob.Hash+"/0")})
		return err
	},
	"GetActionResult": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewActionCacheClient(conn).GetActionResult(ctx, &repb.GetActionResultRequest{InstanceName: instance, ActionDigest: blob})
		return err
	},
	"UpdateActionResult": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := repb.NewActionCacheClient(conn).UpdateActionResult(ctx,
			&repb.UpdateActionResultRequest{InstanceName: instance, ActionDigest: blob, ActionResult: &repb.ActionResult{StdoutRaw: []byte("x")}})
		return err
	},
	"cloister.v1.Builds/Read": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := cloisterpb.NewBuildsClient(conn).Read(ctx, &cloisterpb.ReadBuildRequest{InstanceName: instance})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"cloister.v1.Builds/List": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := cloisterpb.NewBuildsClient(conn).List(ctx, &cloisterpb.ListBuildsRequest{InstanceName: instance})
		return err
	},
	"PublishLifecycleEvent": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := bespb.NewPublishBuildEventClient(conn).PublishLifecycleEvent(ctx, &bespb.PublishLifecycleEventRequest{ProjectId: instance})
		return err
	},
	"PublishBuildToolEventStream": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := bespb.NewPublishBuildEventClient(conn).PublishBuildToolEventStream(ctx)
		if err != nil {
			return err
		}
		// Recv returns the stream's error.
		_ = s.Send(&bespb.PublishBuildToolEventStreamRequest{ProjectId: instance})
		_, err = s.Recv()
		return err
	},
	"FetchBlob": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := assetpb.NewFetchClient(conn).FetchBlob(ctx, &assetpb.FetchBlobRequest{InstanceName: instance})
		return err
	},
	"FetchDirectory": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := assetpb.NewFetchClient(conn).FetchDirectory(ctx, &assetpb.FetchDirectoryRequest{InstanceName: instance})
		return err
	},
	"PushBlob": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := assetpb.NewPushClient(conn).PushBlob(ctx, &assetpb.PushBlobRequest{InstanceName: instance})
		return err
	},
	"PushDirectory": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := assetpb.NewPushClient(conn).PushDirectory(ctx, &assetpb.PushDirectoryRequest{InstanceName: instance})
		return err
	},
	"Execute": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := repb.NewExecutionClient(conn).Execute(ctx, &repb.ExecuteRequest{InstanceName: instance, ActionDigest: blob})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"WaitExecution": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := repb.NewExecutionClient(conn).WaitExecution(ctx, &repb.WaitExecutionRequest{Name: under(instance, "operations/1")})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"CancelOperation": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := longrunningpb.NewOperationsClient(conn).CancelOperation(ctx, &longrunningpb.CancelOperationRequest{Name: under(instance, "operations/1")})
		return err
	},
	"ListOperations": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := longrunningpb.NewOperationsClient(conn).ListOperations(ctx, &longrunningpb.ListOperationsRequest{Name: instance})
		return err
	},
	"List": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		s, err := cloisterpb.NewHistoryClient(conn).List(ctx, &cloisterpb.ListHistoryRequest{InstanceName: instance})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	},
	"Find": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := cloisterpb.NewBlobIndexClient(conn).Find(ctx, &cloisterpb.FindRequest{InstanceName: instance})
		return err
	},
	"CreateLogStream": func(ctx context.Context, conn *grpc.ClientConn, instance string) error {
		_, err := logpb.NewLogStreamServiceClient(conn).CreateLogStream(ctx, &logpb.CreateLogStreamRequest{Parent: instance})
		return err
	},
}

func under(instance, rest string) string {
	if instance == "" {
		return rest
	}
	return instance + "/" + rest
}

// passed reports whether a call reached its service.
func passed(err error) bool {
	return status.Code(err) != codes.PermissionDenied && status.Code(err) != codes.Unauthenticated
}

// TestEveryMethodHasARight checks that no served method is open or unreachable.
func TestEveryMethodHasARight(t *testing.T) {
	s := serve(t, parse(t, "version: 1\ncallers: [{name: nobody, anonymous: true, rights: [{read: none}]}]"), nil)
	expect.Error(t, access.Check(s.info), nil)
	s.info["strange.Service"] = grpc.ServiceInfo{Methods: []grpc.MethodInfo{{Name: "Do"}}}
	expect.Message(t, access.Check(s.info), "/strange.Service/Do", "a method without a right")
	conn := s.dial(nil, "")
	for name, call := range calls {
		err := call(t.Context(), conn, "main")
		if want := name == "GetCapabilities"; passed(err) != want || !want && status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s without a right: %v", name, err)
		}
	}
	expect.Error(t, expect.Err(healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})), nil,
		"health")
}

// TestRule131_RightsAreApart checks that each right permits exactly its methods, in its instances only, and that
// refusals name caller, right and instance.
func TestRule131_RightsAreApart(t *testing.T) {
	methods := map[string]string{
		"read":    "GetCapabilities FindMissingBlobs BatchReadBlobs GetTree Read GetActionResult List Find cloister.v1.Builds/Read cloister.v1.Builds/List FetchBlob FetchDirectory",
		"write":   "GetCapabilities FindMissingBlobs BatchUpdateBlobs Write QueryWriteStatus CreateLogStream PublishLifecycleEvent PublishBuildToolEventStream",
		"cache":   "GetCapabilities UpdateActionResult PushBlob PushDirectory",
		"execute": "GetCapabilities Execute WaitExecution CancelOperation ListOperations",
	}
	text := "version: 1\ncallers:\n"
	for right := range methods {
		text += fmt.Sprintf("- {name: %s, token_sha256: %s, rights: [{%[1]s: [main, team/*]}]}\n", right, sum(right))
	}
	s := serve(t, parse(t, text), nil)
	for right, list := range methods {
		conn := s.dial(nil, "Bearer "+right)
		for name, call := range calls {
			want := strings.Contains(" "+list+" ", " "+name+" ")
			for _, instance := range []string{"main", "team/a/b"} {
				err := call(t.Context(), conn, instance)
				expect.That(t, passed(err) == want, "%s with %s in %s: %v", name, right, instance, err)
				text := status.Convert(err).Message()
				if !want && !(strings.Contains(text, "caller "+right+" ") && strings.Contains(text, `"`+instance+`"`) && strings.Contains(text, "/"+name)) {
					t.Errorf("%s: the refusal does not say who, where and what: %s", name, text)
				}
			}
			for _, instance := range []string{"", "mainly", "team", "main/a", "other"} {
				if err := call(t.Context(), conn, instance); status.Code(err) != codes.PermissionDenied && name != "GetCapabilities" {
					t.Errorf("%s with %s in %q: %v", name, right, instance, err)
				}
			}
		}
	}
}

// TestOperatorsHaveARightOfTheirOwn checks that execute shows the server's state but does not drain, and operate does
// both.
func TestOperatorsHaveARightOfTheirOwn(t *testing.T) {
	text := "version: 1\ncallers:\n"
	for _, right := range []string{"read", "write", "cache", "execute", "operate"} {
		text += fmt.Sprintf("- {name: %s, token_sha256: %s, rights: [%[1]s]}\n", right, sum(right))
	}
	text += fmt.Sprintf("- {name: somewhere, token_sha256: %s, rights: [{execute: main}]}\n", sum("somewhere"))
	rules := parse(t, text)
	s := serve(t, rules, nil)
	calls := map[string]func(context.Context, cloisterpb.FleetClient) error{
		"Status": func(ctx context.Context, c cloisterpb.FleetClient) error {
			_, err := c.Status(ctx, &cloisterpb.StatusRequest{})
			return err
		},
		"Drain": func(ctx context.Context, c cloisterpb.FleetClient) error {
			_, err := c.Drain(ctx, &cloisterpb.DrainRequest{})
			return err
		},
		"Undrain": func(ctx context.Context, c cloisterpb.FleetClient) error {
			_, err := c.Undrain(ctx, &cloisterpb.DrainRequest{})
			return err
		},
	}
	lists := map[string]func(context.Context, *grpc.ClientConn) error{
		"execute somewhere": func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := longrunningpb.NewOperationsClient(conn).ListOperations(ctx, &longrunningpb.ListOperationsRequest{Name: "-"})
			return err
		},
		"read": func(ctx context.Context, conn *grpc.ClientConn) error {
			list, err := cloisterpb.NewHistoryClient(conn).List(ctx, &cloisterpb.ListHistoryRequest{AllInstances: true})
			if err == nil {
				_, err = list.Recv()
			}
			return err
		},
	}
	may := map[string]string{"execute": "Status", "somewhere": "Status", "operate": "Status Drain Undrain"}
	for _, who := range []string{"read", "write", "cache", "execute", "somewhere", "operate"} {
		client := cloisterpb.NewFleetClient(s.dial(nil, "Bearer "+who))
		for name, call := range calls {
			err := call(t.Context(), client)
			expect.That(t, passed(err) == strings.Contains(" "+may[who]+" ", " "+name+" "),
				"%s with %s: %v", name, who, err)
		}
		for callers, list := range lists {
			err := list(t.Context(), s.dial(nil, "Bearer "+who))
			expect.That(t, passed(err) == strings.Contains(" "+callers+" ", " "+who+" "),
				"%s lists all instances: got %v, want success only for %s", who, err, callers)
		}
	}
	expect.That(t, !rules.Reads(t.Context(), "main"), "a context without a call may read")
	expect.That(t, !rules.Sees(t.Context(), "main"), "a context of no call sees what runs")
}

// TestSeesBelow checks that callers see workers that serve an instance in which they may execute.
func TestSeesBelow(t *testing.T) {
	for _, c := range []struct{ rights, sees, not string }{
		{"{execute: main}", " main", "other main/team mai mainly"},
		{"{execute: main/team}", " main main/team", "main/tea main/team/a other team"},
		{"{execute: main/*}", " main main/team main/team/a", "mai mainly other"},
		{"{execute: main/team/*}", " main main/team main/team/a main/team/a/b", "main/tea main/teams other"},
		{"execute", " main main/team", ""},
		{"operate", " main main/team", ""},
		{"{execute: \"\"}", " ", "main"},
		{"read, write, cache, work", "", " main"},
		{"read, {execute: red}", " red", "main"},
	} {
		rules := parse(t, "version: 1\ncallers: [{name: c, anonymous: true, rights: ["+c.rights+"]}]\n")
		ctx := access.First(t.Context(), rules)
		for want, list := range map[bool]string{true: c.sees, false: c.not} {
			for prefix := range strings.SplitSeq(list, " ") {
				expect.That(t, list == "" || rules.SeesBelow(ctx, prefix) == want,
					"with %s, SeesBelow(%q) is %v", c.rights, prefix, !want)
			}
		}
		expect.That(t, !rules.SeesBelow(t.Context(), "main"), "a context of no call sees what is there")
	}
}

// TestRule131_NoCredential checks that clients without a valid credential get UNAUTHENTICATED from every method but
// health, and that no message repeats a credential.
func TestRule131_NoCredential(t *testing.T) {
	s := serve(t, parse(t, "version: 1\ncallers: [{name: ci, token_sha256: "+sum("secret-token")+", rights: [read, write, cache, execute]}]"), nil)
	for _, header := range []string{
		"", "Bearer wrong-token", "Bearer ", "Bearer", "Basic secret-token", "secret-token", "Bearer secret-toke",
		"Bearer " + sum("secret-token"), "Bearer a.b.c", "Bearer " + strings.Repeat("x", 20_000),
	} {
		conn := s.dial(nil, header)
		for name, call := range calls {
			err := call(t.Context(), conn, "")
			expect.That(t, status.Code(err) == codes.Unauthenticated, "%s with %.40q: %v", name, header, err)
			if _, shown, _ := strings.Cut(header, " "); shown != "" && strings.Contains(err.Error(), shown) {
				t.Errorf("the message repeats the token: %v", err)
			}
		}
		if _, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil {
			t.Errorf("health with %.40q: %v", header, err)
		}
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer other")
	expect.Code(t, calls["Read"](ctx, s.dial(nil, "Bearer secret-token"), ""), codes.Unauthenticated, "two headers")
	expect.Error(t, calls["BatchReadBlobs"](t.Context(), s.dial(nil, "bearer  secret-token"), ""), nil, "the token")
}

// TestAnonymous checks that clients without a credential have the anonymous rights, and those with an invalid one none.
func TestAnonymous(t *testing.T) {
	s := serve(t, parse(t, `
version: 1
callers:
  - {name: ci, token_sha256: `+sum("t")+`, rights: [cache]}
  - {name: guest, anonymous: true, rights: [read]}
`), nil)
	expect.Error(t, calls["BatchReadBlobs"](t.Context(), s.dial(nil, ""), "any"), nil)
	expect.Code(t, calls["BatchReadBlobs"](t.Context(), s.dial(nil, "Bearer x"), "any"), codes.Unauthenticated,
		"with a wrong token")
	expect.Code(t, calls["BatchReadBlobs"](t.Context(), s.dial(nil, "Bearer t"), "any"), codes.PermissionDenied,
		"with a token that may less")
}

// TestRule005_006_CapabilitiesOfTheCaller checks that exec_enabled and update_enabled reflect the caller's rights.
func TestRule005_006_CapabilitiesOfTheCaller(t *testing.T) {
	s := serve(t, parse(t, `
version: 1
callers:
  - {name: ci, token_sha256: [`+sum("old")+", "+sum("new")+`], rights: [{execute: a}, {cache: b}, read]}
`), nil)
	for _, token := range []string{"old", "new"} {
		for instance, want := range map[string][2]bool{"a": {true, false}, "b": {false, true}, "c": {false, false}} {
			r, err := repb.NewCapabilitiesClient(s.dial(nil, "Bearer "+token)).GetCapabilities(t.Context(), &repb.GetCapabilitiesRequest{InstanceName: instance})
			must.Succeed(t, err)
			got := [2]bool{r.ExecutionCapabilities.ExecEnabled, r.CacheCapabilities.ActionCacheUpdateCapabilities.UpdateEnabled}
			expect.That(t, got == want,
				"in %s: exec_enabled and update_enabled are %v, want %v", instance, got, want)
		}
	}
}

// TestStrangeResourceNames checks that a reserved word ends the instance, and that no service reads it otherwise.
func TestStrangeResourceNames(t *testing.T) {
	s := serve(t, parse(t, "version: 1\ncallers: [{name: g, anonymous: true, rights: [{read: a}, {execute: a}]}]"), nil)
	conn := s.dial(nil, "")
	read := func(name string) error {
		r, err := bspb.NewByteStreamClient(conn).Read(t.Context(), &bspb.ReadRequest{ResourceName: name})
		if err == nil {
			_, err = r.Recv()
		}
		return err
	}
	for name, want := range map[string]codes.Code{
		"a/logstreams/blobs/" + blob.Hash + "/0":              codes.InvalidArgument, // no instance has such a name
		"b/logstreams/x":                                      codes.PermissionDenied,
		"a/logstreams/x":                                      codes.InvalidArgument, // by the service, which has no such streams
		"a/logstreams/a/logstreams/x":                         codes.InvalidArgument, // the instance once more
		"a/logstreams/b/logstreams/x":                         codes.InvalidArgument, // one of a/logstreams/b
		"logstreams/logstreams/x":                             codes.PermissionDenied,
		"a/logstreams/a/logstreams/b/logstreams/x":            codes.InvalidArgument,
		"a/logstreams/a/logstreams/blobs/" + blob.Hash + "/0": codes.InvalidArgument,
		"a/x":                               codes.InvalidArgument,
		"":                                  codes.InvalidArgument,
		"blobs/a/blobs/" + blob.Hash + "/0": codes.PermissionDenied,
		"a/compressed-blobs/x/" + blob.Hash: codes.InvalidArgument, // by the service
	} {
		expect.Code(t, read(name), want, "%s", name)
	}
	// An operation name without an instance cannot be guessed.
	w, err := repb.NewExecutionClient(conn).WaitExecution(t.Context(), &repb.WaitExecutionRequest{Name: "0123"})
	if err == nil {
		_, err = w.Recv()
	}
	expect.That(t, status.Code(err) == codes.Unimplemented, "a bare name: %v", err)
	for _, name := range []string{"operations", "b", "b/operations"} {
		if _, err := longrunningpb.NewOperationsClient(conn).ListOperations(t.Context(), &longrunningpb.ListOperationsRequest{Name: name}); status.Code(err) != codes.PermissionDenied {
			t.Errorf("list %s: %v", name, err)
		}
	}
}

// loopback is a server certificate.
var loopback = x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, Subject: pkix.Name{CommonName: "server"}}

// TestCertificates checks that a name in a certificate of the right authority identifies a caller.
func TestCertificates(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	rules := parse(t, `
version: 1
callers:
  - {name: cn, certificate: {subject: laptop-7}, rights: [{read: cn}]}
  - {name: uri, certificate: {uri: "spiffe://farm/*"}, rights: [{read: uri}]}
  - {name: dns, certificate: {dns: ci.example.com}, rights: [{read: dns}]}
`)
	if !rules.Certificates() || rules.Tokens() {
		t.Errorf("certificates %t, tokens %t", rules.Certificates(), rules.Tokens())
	}
	cert, key := ours.pair(loopback)
	pair := must.Get(transport.NewPair(cert, key, slog.New(slog.DiscardHandler)))(t)
	optional := must.Get(pair.Server(ours.file, false))(t)
	s := serve(t, rules, optional)
	trusted := must.Get(transport.ReadPool(ours.file))(t)
	connect := func(a *authority, template *x509.Certificate, s *server) *grpc.ClientConn {
		c := &tls.Config{RootCAs: trusted}
		if template != nil {
			mine := must.Get(transport.NewPair(first(a.pair(*template))))(t)
			mine.Client(c)
		}
		return s.dial(c, "")
	}
	farm := must.Get(url.Parse("spiffe://farm/worker/1"))(t)
	for instance, template := range map[string]*x509.Certificate{
		"cn":  {Subject: pkix.Name{CommonName: "laptop-7"}},
		"uri": {URIs: []*url.URL{farm}},
		"dns": {DNSNames: []string{"other.example.com", "ci.example.com"}},
	} {
		conn := connect(ours, template, s)
		for _, other := range []string{"cn", "uri", "dns"} {
			if err := calls["BatchReadBlobs"](t.Context(), conn, other); passed(err) != (other == instance) {
				t.Errorf("%s in %s: %v", instance, other, err)
			}
		}
		expect.That(t, calls["BatchReadBlobs"](t.Context(), connect(theirs, template, s), instance) != nil,
			"%s: a certificate that another authority signed is taken", instance)
	}
	for name, template := range map[string]*x509.Certificate{
		"two common names": {Subject: pkix.Name{CommonName: "laptop-7", ExtraNames: []pkix.AttributeTypeAndValue{
			{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "other"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "laptop-7"},
		}}},
		"none": nil, "unknown": {Subject: pkix.Name{CommonName: "laptop-70"}},
		"a name of another kind": {DNSNames: []string{"laptop-7"}, Subject: pkix.Name{CommonName: "ci.example.com"}},
	} {
		expect.Code(t, calls["BatchReadBlobs"](t.Context(), connect(ours, template, s), "cn"), codes.Unauthenticated,
			"certificate %s", name)
	}
	demanded := must.Get(pair.Server(ours.file, true))(t)
	closed := serve(t, rules, demanded)
	if _, err := healthpb.NewHealthClient(connect(ours, nil, closed)).Check(t.Context(), &healthpb.HealthCheckRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("without a certificate where one is demanded: %v", err)
	}
	if err := calls["BatchReadBlobs"](t.Context(), connect(ours, &x509.Certificate{Subject: pkix.Name{CommonName: "laptop-7"}}, closed), "cn"); err != nil {
		t.Errorf("with one where one is demanded: %v", err)
	}
}

// TestURIsOfCertificates checks that only a URI that has one spelling is below a prefix.
func TestURIsOfCertificates(t *testing.T) {
	ours := newAuthority(t)
	rules := parse(t, `
version: 1
callers:
  - {name: uri, certificate: {uri: "spiffe://farm/worker/*"}, rights: [{read: below}]}
  - {name: exact, certificate: {uri: "spiffe://farm/head"}, rights: [{read: exact}]}
  - {name: web, certificate: {uri: "https://example.com/a%20b/"}, rights: [{read: web}]}
  - {name: any, certificate: {uri: "*"}, rights: [{read: any}]}
`)
	cert, key := ours.pair(loopback)
	pair := must.Get(transport.NewPair(first(cert, key)))(t)
	config := must.Get(pair.Server(ours.file, true))(t)
	trusted := must.Get(transport.ReadPool(ours.file))(t)
	s := serve(t, rules, config)
	for _, c := range []struct {
		uris     string
		instance string // in which it may read, "" if nobody has such a certificate
	}{
		{"spiffe://farm/worker/1", "below"},
		{"SPIFFE://farm/worker/1/2", "below"},
		{"spiffe://farm/head", "exact"},
		{"https://example.com/a%20b/", "web"},
		{"spiffe://other/worker/1", "any"},
		{"https://example.com/x https://example.com/y", "any"},
		{"spiffe://farm/worker/../head", ""},
		{"spiffe://farm/worker/./1", ""},
		{"spiffe://farm/worker/..", ""},
		{"spiffe://farm/worker//1", ""},
		{"spiffe://farm/worker/", ""},
		{"spiffe://farm/worker/%2e%2e/head", ""},
		{"spiffe://farm/worker/%31", ""},
		{"spiffe://farm/worker/1?x", ""},
		{"spiffe://farm/worker/1#x", ""},
		{"spiffe://farm/worker/1 spiffe://farm/head", ""},
		{"https://example.com/x spiffe://farm/head", ""},
	} {
		template := x509.Certificate{}
		for text := range strings.FieldsSeq(c.uris) {
			u := must.Get(url.Parse(text))(t)
			template.URIs = append(template.URIs, u)
		}
		mine := must.Get(transport.NewPair(first(ours.pair(template))))(t)
		client := &tls.Config{RootCAs: trusted}
		mine.Client(client)
		conn := s.dial(client, "")
		for _, instance := range []string{"below", "exact", "web", "any"} {
			want := codes.PermissionDenied
			if c.instance == "" {
				want = codes.Unauthenticated
			} else if c.instance == instance {
				want = codes.OK
			}
			expect.Code(t, calls["BatchReadBlobs"](t.Context(), conn, instance), want, "%s in %s", c.uris, instance)
		}
	}
}

// first adds a log to two files, for transport.NewPair.
func first(cert, key string) (string, string, *slog.Logger) {
	return cert, key, slog.New(slog.DiscardHandler)
}

// TestCertificateIsReadAgain checks that the next connection uses a new certificate, and that unreadable files leave
// the old one in use.
func TestCertificateIsReadAgain(t *testing.T) {
	a := newAuthority(t)
	cert, key := a.pair(loopback)
	var log syncbuf.Buffer
	pair := must.Get(transport.NewPair(cert, key, slog.New(slog.NewTextHandler(&log, nil))))(t)
	config := must.Get(pair.Server("", false))(t)
	s := serve(t, parse(t, "version: 1\ncallers: [{name: g, anonymous: true, rights: [read]}]"), config)
	pool := must.Get(transport.ReadPool(a.file))(t)
	shown := func() string {
		t.Helper()
		conn := must.Get(tls.Dial("tcp", s.address, &tls.Config{RootCAs: pool, NextProtos: []string{"h2"}}))(t)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	old := shown()
	expect.That(t, shown() == old, "another certificate without a reason")
	// Files of one size and time may differ.
	stamp := time.Now().Add(-time.Minute)
	touch := func() {
		stamp = stamp.Add(time.Second)
		for _, name := range []string{cert, key} {
			must.Succeed(t, os.Chtimes(name, stamp, stamp))
		}
	}
	a.sign(loopback, cert, key)
	touch()
	fresh := shown()
	expect.That(t, fresh != old, "the certificate was not read again")
	expect.Error(t, pair.Stale(), nil, "after a renewal")
	write(t, key, []byte("half of a key"))
	touch()
	for range 2 {
		expect.That(t, shown() == fresh, "an invalid key changed the certificate")
		expect.Message(t, pair.Stale(), key, "with an invalid key")
	}
	expect.Equal(t, strings.Count(log.String(), "level=WARN"), 1, "warnings of a key in\n%s", &log)
	other, otherKey := a.pair(loopback)
	for _, names := range [][2]string{{cert, otherKey}, {other, key}, {other, "/nonexistent"}, {key, otherKey}} {
		expect.That(t, expect.Err(transport.NewPair(first(names[0], names[1]))) != nil, "%v are no pair", names)
	}
	a.sign(loopback, cert, key)
	touch()
	if got := shown(); got == fresh || got == old {
		t.Error("the certificate was not read again after a mistake")
	}
	expect.Error(t, pair.Stale(), nil, "after a mistake")
	expect.That(t, expect.Err(pair.Server(key, true)) != nil, "a file without a certificate is an authority")
}

// TestStrangersMustHurry checks the time limit for the first message of a call without a credential, which gRPC reads
// before it calls an interceptor. Calls with a credential, and health watches after their first message, have no limit.
func TestStrangersMustHurry(t *testing.T) {
	rules := parse(t, "version: 1\ncallers: [{name: ci, token_sha256: "+sum("secret")+", rights: [read]}]")
	synctest.Test(t, func(t *testing.T) {
		g, alive := newServer(rules, nil)
		conn := grpctest.Connect(t, g)
		begin := func(ctx context.Context, method string) grpc.ClientStream {
			stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
			must.Succeed(t, err)
			return stream
		}
		secret := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer secret")
		known := begin(secret, repb.ContentAddressableStorage_FindMissingBlobs_FullMethodName)
		watch := must.Get(healthpb.NewHealthClient(conn).Watch(t.Context(), &healthpb.HealthCheckRequest{}))(t)
		if m, err := watch.Recv(); err != nil || m.Status != healthpb.HealthCheckResponse_SERVING {
			t.Fatalf("health: %v, %v", m, err)
		}
		for _, method := range []string{
			repb.ContentAddressableStorage_BatchUpdateBlobs_FullMethodName,
			"/google.bytestream.ByteStream/Write",
			healthpb.Health_Check_FullMethodName,
			healthpb.Health_Watch_FullMethodName,
		} {
			// The message never arrives completely.
			began := time.Now()
			if err := begin(t.Context(), method).RecvMsg(&healthpb.HealthCheckResponse{}); err == nil || time.Since(began) > time.Minute {
				t.Errorf("%s: the server waits for an unauthenticated caller: %v after %v", method, err, time.Since(began))
			}
		}
		time.Sleep(time.Minute)
		must.Succeed(t, known.SendMsg(&repb.FindMissingBlobsRequest{}))
		expect.Error(t, errors.Join(known.CloseSend(), known.RecvMsg(&repb.FindMissingBlobsResponse{})), nil,
			"a slow caller")
		alive.Shutdown()
		if m, err := watch.Recv(); err != nil || m.Status != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Errorf("health, later: %v, %v", m, err)
		}
	})
}
