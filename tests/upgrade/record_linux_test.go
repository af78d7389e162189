// SPDX-License-Identifier: Apache-2.0

package upgrade_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

var (
	record  = flag.String("record", "", "name of a store to record in testdata")
	program = flag.String("program", "", "cloister that writes the recorded store, of any version")
)

// A recorder fills the store of a server through the API, so that it works with programs of all versions.
type recorder struct {
	*testing.T
	*Contents
	ctx  context.Context
	conn *grpc.ClientConn
	caps *repb.ServerCapabilities
}

// TestRecord records a store with -record and -program; see the package comment. It runs as root, since small inputs of
// others are copied.
func TestRecord(t *testing.T) {
	if *record == "" {
		return
	}
	dir := must.Get(os.MkdirTemp("", "cloister-upgrade-"))(t)
	defer os.RemoveAll(dir)
	help := must.Get(exec.Command(*program, "serve", "--help").Output())(t)
	args := []string{"serve", "--dir", filepath.Join(dir, storeName), "--listen", "127.0.0.1:0", "--max-size", "1GiB"}
	checks := bytes.Contains(help, []byte("--repro-sample"))
	if checks {
		args = append(args, "--repro-sample", "100%")
	}
	// In a UTS namespace, since the store has the name of its host.
	cmd := exec.Command("unshare", append([]string{"--uts", "sh", "-c", `hostname worker; exec "$0" "$@"`, *program}, args...)...)
	cmd.Stderr = os.Stderr
	stdout := must.Get(cmd.StdoutPipe())(t)
	must.Succeed(t, cmd.Start())
	defer cmd.Process.Kill()
	r := &recorder{T: t, Contents: &Contents{From: time.Now().UTC()}}
	r.connect(addressOf(t, bufio.NewScanner(stdout)))
	for _, in := range []string{"", "main"} {
		for _, f := range cas.Functions() {
			if slices.Contains(r.caps.CacheCapabilities.DigestFunctions, f.Proto()) {
				r.fill(in, f)
			}
		}
	}
	r.History = bytes.Contains(help, []byte("--history-size"))
	r.Executed, _ = r.execute("echo out > out")
	if violation, _ := r.execute("echo out > out; echo x > /etc/cloister-upgrade; exit 0"); bytes.Contains(help, []byte("--audit-size")) {
		r.Violation = violation
	}
	if checks {
		for message := ""; !strings.Contains(message, "not reproducible"); time.Sleep(100 * time.Millisecond) {
			r.Verdict, message = r.execute("pwd > out")
		}
	}
	r.Until = time.Now().UTC()
	must.Succeed(t, r.conn.Close())
	must.Succeed(t, cmd.Process.Signal(os.Interrupt))
	must.Succeed(t, cmd.Wait())
	hideBoot(t, filepath.Join(dir, storeName))
	r.Version = strings.TrimSpace(string(must.Get(os.ReadFile(filepath.Join(dir, storeName, "version")))(t)))
	pack(t, archiveOf(*record), dir, r.Contents)
}

// hideBoot makes a store one of a machine that has restarted since: the boot IDs in it are no longer this one's.
func hideBoot(t *testing.T, store string) {
	boot := filepath.Join(store, "boot")
	id := bytes.TrimSpace(must.Get(os.ReadFile(boot))(t))
	other := []byte("00000000-0000-0000-0000-000000000000")
	for _, path := range []string{boot, filepath.Join(store, "checkpoint")} {
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // an earlier version wrote none
		}
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(path, bytes.ReplaceAll(text, id, other), 0o600))
	}
}

// addressOf reads the address that serve prints, and leaves the rest to be read by nobody: serve prints little more.
func addressOf(t *testing.T, lines *bufio.Scanner) string {
	t.Helper()
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), "--remote_executor=grpc://"); ok {
			return strings.Fields(rest)[0]
		}
	}
	t.Fatal("serve ended before it printed its address")
	return ""
}

func (r *recorder) connect(address string) {
	conn := must.Get(grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())))(r.T)
	r.conn = conn
	who := must.Get(proto.Marshal(&repb.RequestMetadata{
		ToolInvocationId: "upgrade", TargetId: "//upgrade:target", ActionMnemonic: "Upgrade",
	}))(r.T)
	r.ctx = metadata.AppendToOutgoingContext(r.Context(),
		"build.bazel.remote.execution.v2.requestmetadata-bin", string(who))
	query := &repb.GetCapabilitiesRequest{InstanceName: "main"}
	r.caps = must.Get(repb.NewCapabilitiesClient(conn).GetCapabilities(r.ctx, query))(r.T)
}

// put uploads a blob.
func (r *recorder) put(instance string, f cas.Function, content []byte) cas.Digest {
	r.Helper()
	d := f.Sum(content)
	answer, err := repb.NewContentAddressableStorageClient(r.conn).BatchUpdateBlobs(r.ctx, &repb.BatchUpdateBlobsRequest{
		InstanceName: instance, DigestFunction: f.Proto(),
		Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: d.Proto(), Data: content}},
	})
	must.Succeed(r.T, err)
	if code := answer.Responses[0].Status.GetCode(); code != 0 {
		r.Fatalf("%v blob: %v", f, answer)
	}
	return d
}

// fill uploads a small and a large blob, one in chunks, and a result.
func (r *recorder) fill(instance string, f cas.Function) {
	small := []byte("a small blob of instance " + instance)
	large := bytes.Repeat([]byte("a large blob of instance "+instance+"\n"), 4000)
	for _, content := range [][]byte{small, large} {
		r.Blobs = append(r.Blobs, Blob{instance, r.put(instance, f, content).String(), false})
	}
	if r.caps.CacheCapabilities.GetSpliceBlobSupport() {
		var chunks []*repb.Digest
		var whole []byte
		for _, text := range []string{"one\n", "two\n", "one\n"} {
			chunk := bytes.Repeat([]byte(text), 8<<10)
			chunks = append(chunks, r.put(instance, f, chunk).Proto())
			whole = append(whole, chunk...)
		}
		d := f.Sum(whole)
		must.Get(repb.NewContentAddressableStorageClient(r.conn).SpliceBlob(r.ctx, &repb.SpliceBlobRequest{
			InstanceName: instance, BlobDigest: d.Proto(), ChunkDigests: chunks, DigestFunction: f.Proto(),
		}))(r.T)
		r.Blobs = append(r.Blobs, Blob{instance, d.String(), true})
	}
	action := r.put(instance, f, []byte{})
	if message, err := proto.Marshal(&repb.Action{Salt: []byte("result")}); err == nil {
		action = r.put(instance, f, message)
	}
	stdout := "stdout of " + instance
	_, err := repb.NewActionCacheClient(r.conn).UpdateActionResult(r.ctx, &repb.UpdateActionResultRequest{
		InstanceName: instance, ActionDigest: action.Proto(), DigestFunction: f.Proto(),
		ActionResult: &repb.ActionResult{StdoutRaw: []byte(stdout), ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: "upgrade"}},
	})
	must.Succeed(r.T, err)
	r.Results = append(r.Results, Result{instance, action.String(), stdout})
}

// execute executes a shell command in instance main, and returns its action and the message of the answer.
func (r *recorder) execute(script string) (action, message string) {
	r.Helper()
	encode := func(m proto.Message) cas.Digest {
		return r.put("main", cas.SHA256, must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(m))(r.T))
	}
	command := encode(&repb.Command{
		Arguments: []string{"/bin/sh", "-c", script}, OutputPaths: []string{"out"}, OutputFiles: []string{"out"},
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "PATH", Value: "/usr/bin:/bin"}},
	})
	d := encode(&repb.Action{CommandDigest: command.Proto(), InputRootDigest: encode(&repb.Directory{}).Proto()})
	stream, err := repb.NewExecutionClient(r.conn).Execute(r.ctx, &repb.ExecuteRequest{InstanceName: "main", ActionDigest: d.Proto()})
	must.Succeed(r.T, err)
	for {
		operation := must.Get(stream.Recv())(r.T)
		if !operation.Done {
			continue
		}
		var answer repb.ExecuteResponse
		must.Succeed(r.T, operation.GetResponse().UnmarshalTo(&answer))
		if code := answer.Status.GetCode(); code != 0 {
			r.Fatalf("%s: %v", script, &answer)
		}
		return d.String(), answer.Message
	}
}
