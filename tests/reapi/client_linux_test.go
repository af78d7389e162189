// SPDX-License-Identifier: Apache-2.0

// Package reapi_test tests a running cloister serve as a client of the Remote Execution API. The numbers in test names
// are those of the rules in docs/reapi.md.
package reapi_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

var built program.Program

// TestMain runs only TestRules with -endpoint, because the other tests need their own server.
func TestMain(m *testing.M) {
	namespace.Init()
	flag.Parse()
	if run := flag.Lookup("test.run"); *endpoint != "" && !strings.HasPrefix(run.Value.String(), "TestRules") {
		flag.Set("test.run", "^TestRules$")
	}
	os.Exit(built.Main(m))
}

// A client talks to one server.
type client struct {
	testing.TB
	ours     bool                     // the server is of this tree; set by TestRules
	caps     *repb.ServerCapabilities // set by TestRules
	instance string
	server   *bazelrun.Server // nil unless started by the test
	ended    *bool            // the test has stopped the server itself
	dir      string           // directory of the server's store
	lose     func(cas.Digest) // makes the server lose a blob; nil if the files must be removed instead
	exec     repb.ExecutionClient
	cas      repb.ContentAddressableStorageClient
	ac       repb.ActionCacheClient
	bs       bspb.ByteStreamClient
	conn     *grpc.ClientConn
}

// over returns a client on conn.
func over(t testing.TB, conn *grpc.ClientConn) *client {
	return &client{
		TB:   t,
		exec: repb.NewExecutionClient(conn),
		cas:  repb.NewContentAddressableStorageClient(conn),
		ac:   repb.NewActionCacheClient(conn),
		bs:   bspb.NewByteStreamClient(conn),
		conn: conn,
	}
}

// serve starts a server for the test.
func serve(t testing.TB) *client {
	t.Helper()
	confined(t)
	return serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store")})
}

// sandboxed returns why the machine does not support sandboxes.
var sandboxed = sync.OnceValue(func() error {
	b := namespace.New(namespace.Config{})
	defer b.Close()
	_, err := b.Probe(context.Background())
	return err
})

// confined skips the test if the machine does not support sandboxes.
func confined(t testing.TB) {
	t.Helper()
	if err := sandboxed(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
}

// serveAs starts a server with cfg for the test, on a new or an existing store.
func serveAs(t testing.TB, cfg bazelrun.ServerConfig) *client {
	t.Helper()
	cfg.Binary, cfg.Home = built.Path(t), filepath.Dir(cfg.Dir)
	// Whatever the test did, every stored blob must match its digest after the server has stopped.
	t.Cleanup(func() {
		if blobs, err := bazelrun.Verify(context.Background(), cfg); err != nil || blobs == 0 {
			t.Errorf("got %d blobs in the store, %v, want some", blobs, err)
		}
	})
	return start(t, cfg)
}

// declaredToolchain is the toolchain of all servers, none of which tests what follows from a change of it.
const declaredToolchain = "reapi"

// start starts the server cfg for the test, on any free port.
func start(t testing.TB, cfg bazelrun.ServerConfig) *client {
	t.Helper()
	cfg.Listen = "127.0.0.1:0"
	if !cfg.NoJobs && !slices.Contains(cfg.Args, "--worker-listen") {
		cfg.Toolchain = declaredToolchain
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := must.Get(bazelrun.StartServer(ctx, cfg))(t)
	ended := false
	t.Cleanup(func() {
		if err := s.Stop(); err != nil && !ended {
			t.Error(err)
		}
	})
	c := dial(t, s.Addr)
	c.server, c.ended, c.dir = s, &ended, cfg.Dir
	return c
}

// in returns the client for a subtest.
func (c *client) in(t testing.TB) *client {
	d := *c
	d.TB = t
	return &d
}

// A blocker is an action that runs until end.
type blocker struct {
	*client
	script string
	result chan *answer
}

// block executes a new action and returns when it runs.
func (c *client) block() *blocker {
	c.Helper()
	b := &blocker{c, fmt.Sprintf("trap 'exit 0' USR1; sleep 1h & wait # %x", fresh(8)), make(chan *answer, 1)}
	d := c.prepare(job{script: b.script})
	go func() { b.result <- c.request(d, nil) }()
	must.Hold(c, "running", func() bool { return len(sandboxtest.Running(c, b.script)) > 0 })
	return b
}

// end ends the action, which must run until then, and checks that it has a result.
func (b *blocker) end() {
	b.Helper()
	select {
	case a := <-b.result:
		b.Fatalf("the blocking action ended too early: %v, %v", a.response, a.err)
	default:
	}
	must.Hold(b, "signalled", func() bool { return sandboxtest.Signal(b, b.script, syscall.SIGUSR1) > 0 })
	b.wantSuccess("the blocking action", <-b.result)
}

// put uploads a blob.
func (c *client) put(b []byte) *repb.Digest {
	c.Helper()
	if err := c.stream(b); err != nil {
		c.Fatalf("upload of %d bytes: %v", len(b), err)
	}
	return cas.SHA256.Sum(b).Proto()
}

// putProto uploads a message.
func (c *client) putProto(m proto.Message) *repb.Digest {
	c.Helper()
	b, _ := encoded(c, m)
	return c.put(b)
}

// get downloads a blob.
func (c *client) get(d *repb.Digest) string {
	c.Helper()
	text, err := c.download(d)
	must.Be(c, err == nil, "download of %v: %v", d, err)
	return text
}

// download returns a blob, or the error of the server.
func (c *client) download(d *repb.Digest) (string, error) {
	b, _, err := c.read(c.readName(d), 0, 0)
	if err == nil && cas.SHA256.Sum(b).Hash() != d.GetHash() {
		err = errors.New("the content does not match the digest")
	}
	return string(b), err
}

// decodeTree downloads a Tree.
func (c *client) decodeTree(d *repb.Digest) *repb.Tree {
	c.Helper()
	t := &repb.Tree{}
	if err := proto.Unmarshal([]byte(c.get(d)), t); err != nil {
		c.Fatalf("Tree %v: %v", d, err)
	}
	return t
}

// A file is a file of an input tree, or a symlink if link is set; x makes it executable.
type file struct {
	text, link string
	x          bool
}

// tree uploads an input tree and returns its root. A path that ends in a slash is an empty directory.
func (c *client) tree(files map[string]file) *repb.Digest {
	c.Helper()
	type node struct {
		dir  *repb.Directory
		subs map[string]bool
	}
	dirs := map[string]*node{}
	var at func(string) *node
	at = func(p string) *node {
		if dirs[p] == nil {
			dirs[p] = &node{&repb.Directory{}, map[string]bool{}}
			if p != "." {
				at(path.Dir(p)).subs[path.Base(p)] = true
			}
		}
		return dirs[p]
	}
	at(".")
	for p, f := range files {
		if strings.HasSuffix(p, "/") {
			at(path.Clean(p))
			continue
		}
		d := at(path.Dir(p)).dir
		if f.link != "" {
			d.Symlinks = append(d.Symlinks, &repb.SymlinkNode{Name: path.Base(p), Target: f.link})
		} else {
			d.Files = append(d.Files, &repb.FileNode{Name: path.Base(p), Digest: c.put([]byte(f.text)), IsExecutable: f.x})
		}
	}
	var upload func(string) *repb.Digest
	upload = func(p string) *repb.Digest {
		n := dirs[p]
		for sub := range n.subs {
			n.dir.Directories = append(n.dir.Directories, &repb.DirectoryNode{Name: sub, Digest: upload(path.Join(p, sub))})
		}
		slices.SortFunc(n.dir.Files, byName[*repb.FileNode])
		slices.SortFunc(n.dir.Directories, byName[*repb.DirectoryNode])
		slices.SortFunc(n.dir.Symlinks, byName[*repb.SymlinkNode])
		return c.putProto(n.dir)
	}
	return upload(".")
}

func byName[N interface{ GetName() string }](a, b N) int {
	return strings.Compare(a.GetName(), b.GetName())
}
