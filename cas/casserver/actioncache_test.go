// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

var action = sum("action")

// lookup gets the result of action.
func (c *client) lookup(t *testing.T) (*repb.ActionResult, error) {
	t.Helper()
	return c.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: action.Proto()})
}

// record records r as the result of action.
func (c *client) record(t *testing.T, r *repb.ActionResult) error {
	t.Helper()
	_, err := c.UpdateActionResult(t.Context(), &repb.UpdateActionResultRequest{ActionDigest: action.Proto(), ActionResult: r})
	return err
}

// result stores the blobs of a result with all kinds of outputs, and returns both.
func (c *client) result(t *testing.T) (*repb.ActionResult, map[string]cas.Digest) {
	t.Helper()
	child := &repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: c.put(t, "file of child").Proto()}}}
	_, childDigest, err := cas.MarshalProto(cas.SHA256, child)
	must.Succeed(t, err)
	tree := &repb.Tree{
		Root: &repb.Directory{
			Files:       []*repb.FileNode{{Name: "f", Digest: c.put(t, "file of root").Proto()}},
			Directories: []*repb.DirectoryNode{{Name: "d", Digest: childDigest.Proto()}},
		},
		Children: []*repb.Directory{child},
	}
	treeDigest := must.Get(cas.PutProto(t.Context(), c.memory(t, ""), cas.SHA256, tree))(t)
	leaf := c.directory(t, "leaf")
	root := c.directory(t, "top", leaf)
	blobs := map[string]cas.Digest{
		"file": c.put(t, "file"), "stdout": c.put(t, "out"), "stderr": c.put(t, "err"),
		"tree": treeDigest, "file of root": sum("file of root"), "file of child": sum("file of child"),
		"root directory": root, "directory": leaf, "file of directory": c.put(t, "leaf"), "file of root directory": c.put(t, "top"),
	}
	return &repb.ActionResult{
		OutputFiles: []*repb.OutputFile{{Path: "out/f", Digest: sum("file").Proto()}},
		OutputDirectories: []*repb.OutputDirectory{
			{Path: "tree", TreeDigest: treeDigest.Proto()},
			{Path: "dir", RootDirectoryDigest: root.Proto()},
		},
		OutputSymlinks:    []*repb.OutputSymlink{{Path: "link", Target: "../elsewhere"}},
		StdoutDigest:      sum("out").Proto(),
		StderrDigest:      sum("err").Proto(),
		ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: "w"},
	}, blobs
}

func TestUpdateStoresInlinedContents(t *testing.T) {
	c := serve(t, casserver.Config{})
	must.Succeed(t, c.record(t, &repb.ActionResult{
		StdoutRaw:   []byte("out"),
		StderrRaw:   []byte("err"),
		OutputFiles: []*repb.OutputFile{{Path: "f", Digest: sum("file").Proto(), Contents: []byte("file")}},
	}))
	want := &repb.ActionResult{
		StdoutDigest: sum("out").Proto(),
		StderrDigest: sum("err").Proto(),
		OutputFiles:  []*repb.OutputFile{{Path: "f", Digest: sum("file").Proto()}},
	}
	got := must.Get(c.memory(t, "").Lookup(t.Context(), action))(t)
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("recorded (-want +got):\n%s", diff)
	}
	for _, data := range []string{"out", "err", "file"} {
		expect.That(t, slices.Contains(c.memory(t, "").Digests(), sum(data)), "%q is not stored", data)
	}
}

func TestDamagedOutputToInlineIsMiss(t *testing.T) {
	c := serve(t, casserver.Config{})
	d := c.put(t, "out")
	must.Succeed(t, c.record(t, &repb.ActionResult{StdoutDigest: d.Proto()}))
	c.memory(t, "").Corrupt(d)
	_, err := c.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: action.Proto(), InlineStdout: true})
	wantCode(t, err, codes.NotFound)
}

// padded returns a result whose encoding has n bytes.
func padded(n int) *repb.ActionResult {
	r := &repb.ActionResult{OutputSymlinks: []*repb.OutputSymlink{{Path: "l", Target: strings.Repeat("x", n)}}}
	r.OutputSymlinks[0].Target = r.OutputSymlinks[0].Target[proto.Size(r)-n:]
	return r
}

func TestUpdateRejectsResultsTooLargeToReturn(t *testing.T) {
	c := serve(t, casserver.Config{})
	const limit = 3 << 20
	wantCode(t, c.record(t, padded(limit+1)), codes.InvalidArgument, action.String(), fmt.Sprint(limit+1), fmt.Sprint(limit))
	_, err := c.lookup(t)
	wantCode(t, err, codes.NotFound)
	// Contents that are stored as blobs do not count.
	r := padded(limit)
	r.StdoutRaw = []byte(noise(1 << 20))
	r.OutputSymlinks[0].Target = r.OutputSymlinks[0].Target[100:] // makes room for the digest
	wantCode(t, c.record(t, r), codes.OK)
	_, err = c.lookup(t)
	wantCode(t, err, codes.OK)
	wantCode(t, c.record(t, padded(limit)), codes.OK)
	_, err = c.lookup(t)
	wantCode(t, err, codes.OK)
}

// Only a worker can record such results.
func TestResultAboveMessageLimitIsFailedPrecondition(t *testing.T) {
	c := serve(t, casserver.Config{})
	for n, want := range map[int]codes.Code{4 << 20: codes.OK, 4<<20 + 1: codes.FailedPrecondition} {
		must.Succeed(t, c.memory(t, "").Record(t.Context(), action, padded(n)))
		_, err := c.lookup(t)
		wantCode(t, err, want, action.String(), fmt.Sprint(n), "declare fewer outputs")
	}
}

// Errors must fit into the trailers of a reply.
func TestErrorsAreShort(t *testing.T) {
	c := serve(t, casserver.Config{})
	long := strings.Repeat("\u2028", 20_000)
	_, name := c.read(t.Context(), &bspb.ReadRequest{ResourceName: long})
	_, hash := c.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: &repb.Digest{Hash: long}})
	_, stated := c.GetActionResult(t.Context(), &repb.GetActionResultRequest{
		ActionDigest: &repb.Digest{Hash: long}, DigestFunction: repb.DigestFunction_SHA256,
	})
	_, token := c.tree(t.Context(), &repb.GetTreeRequest{RootDigest: c.directory(t, "f").Proto(), PageToken: long})
	for what, err := range map[string]error{
		"resource name":             name,
		"hash":                      hash,
		"hash of a stated function": stated,
		"page token":                token,
		"path":                      c.record(t, &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "/" + long}}}),
		"path of symlink":           c.record(t, &repb.ActionResult{OutputSymlinks: []*repb.OutputSymlink{{Path: long}}}),
		"directory":                 c.record(t, &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{{Path: long}}}),
	} {
		wantCode(t, err, codes.InvalidArgument)
		if n := len(status.Convert(err).Message()); n > 4<<10 {
			t.Errorf("%s: an error of %d bytes", what, n)
		}
	}
}

func TestOnUpdateGetsRecordedResults(t *testing.T) {
	var results []*repb.ActionResult
	c := serve(t, casserver.Config{OnUpdate: func(_ context.Context, instance string, a cas.Digest, r *repb.ActionResult) {
		expect.That(t, instance == "" && a == action, "got instance %q, action %s", instance, a)
		results = append(results, proto.CloneOf(r))
	}})
	r, blobs := c.result(t)
	r.StdoutRaw, r.StdoutDigest = []byte("inlined"), nil
	must.Succeed(t, c.record(t, r))
	recorded, err := c.lookup(t)
	wantCode(t, err, codes.OK)
	r.ExitCode = 1
	wantCode(t, c.record(t, r), codes.InvalidArgument)
	r.ExitCode = 0
	c.memory(t, "").Delete(blobs["file"])
	wantCode(t, c.record(t, r), codes.FailedPrecondition)
	expect.That(t, len(results) == 1 && results[0].StdoutDigest != nil && proto.Equal(results[0], recorded),
		"got %v, want only %v", results, recorded)
}

func TestOnLookupGetsEachAnswer(t *testing.T) {
	var results []string
	c := serve(t, casserver.Config{OnLookup: func(_ context.Context, instance string, a cas.Digest, r *repb.ActionResult) {
		results = append(results, fmt.Sprintf("%q %s %t", instance, a, r != nil))
	}})
	_, err := c.lookup(t)
	wantCode(t, err, codes.NotFound)
	r, blobs := c.result(t)
	must.Succeed(t, c.record(t, r))
	_, err = c.lookup(t)
	wantCode(t, err, codes.OK)
	c.memory(t, "").Delete(blobs["file"])
	_, err = c.lookup(t)
	wantCode(t, err, codes.NotFound)
	_, err = c.GetActionResult(t.Context(), &repb.GetActionResultRequest{})
	wantCode(t, err, codes.InvalidArgument)
	want := []string{`"" ` + action.String() + " false", `"" ` + action.String() + " true", `"" ` + action.String() + " false"}
	expect.Slices(t, results, want)
}
