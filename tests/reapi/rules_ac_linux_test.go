// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// actionCacheRules are the rules 62 to 69.
var actionCacheRules = []rule{
	{62, "ac", "an incomplete cache hit is a miss", updates, incompleteHit},
	{63, "ac", "a cache hit keeps all its blobs", ownServer, hitStays},
	{64, "ac", "inlining is a hint and has limits", updates, inlining},
	{65, "ac", "updates are rejected as advertised", anything, refusedUpdates},
	{66, "ac", "results with bad digests or paths are rejected", updates, badResults},
	{67, "ac", "a result with absent outputs is never a hit", updates, absentOutputs},
	{68, "ac", "a failure is never a hit of Execute", updates, failedResults},
	{69, "ac", "results of different keys are separate", updates, resultsApart},
}

// lookup calls GetActionResult.
func (c *client) lookup(action *repb.Digest) (*repb.ActionResult, error) {
	return c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{InstanceName: c.instance, ActionDigest: action})
}

// A referral is a result that refers to the blob victim in one of the possible ways.
type referral struct {
	by     string
	victim []byte
	result *repb.ActionResult
}

// referrals returns one referral of each kind, with victims of at least size bytes. It uploads all blobs, but the
// victims only if upload is set.
func (c *client) referrals(size int, upload bool) []referral {
	digest := func(b []byte) *repb.Digest { return cas.SHA256.Sum(b).Proto() }
	encode := func(m proto.Message) []byte {
		b, _ := encoded(c, m)
		return b
	}
	holding := func(b []byte) *repb.Directory {
		return &repb.Directory{Files: []*repb.FileNode{{Name: "file-" + uuid(), Digest: digest(b)}}}
	}
	// padded returns a Directory of at least size bytes.
	padded := func() *repb.Directory {
		d := &repb.Directory{}
		for i := 0; i*250 < size+250; i++ {
			d.Files = append(d.Files,
				&repb.FileNode{Name: fmt.Sprintf("%06d-%s", i, strings.Repeat("x", 150)+uuid()), Digest: digest(nil)})
		}
		return d
	}
	var all []referral
	add := func(by string, victim []byte, r *repb.ActionResult, others ...[]byte) {
		if upload {
			others = append(others, victim)
		}
		for _, b := range others {
			c.put(b)
		}
		all = append(all, referral{by, victim, r})
	}
	under := func(t *repb.OutputDirectory) *repb.ActionResult {
		t.Path = "dir"
		return &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{t}}
	}
	file := fresh(size)
	add("an output file", file, &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: "out", Digest: digest(file)}}})
	out := fresh(size)
	add("stdout", out, &repb.ActionResult{StdoutDigest: digest(out)})
	errors := fresh(size)
	add("stderr", errors, &repb.ActionResult{StderrDigest: digest(errors)})
	tree := encode(&repb.Tree{Root: padded()})
	add("a Tree", tree, under(&repb.OutputDirectory{TreeDigest: digest(tree)}))
	inRoot := fresh(size)
	tree = encode(&repb.Tree{Root: holding(inRoot)})
	add("a file in the root of a Tree", inRoot, under(&repb.OutputDirectory{TreeDigest: digest(tree)}), tree)
	inChild := fresh(size)
	child := holding(inChild)
	parentOf := func(sub []byte) *repb.Directory {
		return &repb.Directory{Directories: []*repb.DirectoryNode{{Name: "sub", Digest: digest(sub)}}}
	}
	tree = encode(&repb.Tree{Root: parentOf(encode(child)), Children: []*repb.Directory{child}})
	add("a file in a child of a Tree", inChild, under(&repb.OutputDirectory{TreeDigest: digest(tree)}), tree)
	root := encode(padded())
	add("a root Directory", root, under(&repb.OutputDirectory{RootDirectoryDigest: digest(root)}))
	sub := encode(padded())
	parent := encode(parentOf(sub))
	add("a Directory below a root Directory", sub, under(&repb.OutputDirectory{RootDirectoryDigest: digest(parent)}),
		parent)
	below := fresh(size)
	holder := encode(holding(below))
	parent = encode(parentOf(holder))
	add("a file below a root Directory", below, under(&repb.OutputDirectory{RootDirectoryDigest: digest(parent)}), parent,
		holder)
	return all
}

// losing returns a function that makes a server lose blobs and returns a client of it. It returns nil if that is
// impossible.
func (c *client) losing() func(blobs [][]byte) *client {
	switch {
	case c.lose != nil:
		return func(blobs [][]byte) *client {
			for _, b := range blobs {
				c.lose(cas.SHA256.Sum(b))
			}
			return c
		}
	case c.server != nil:
		return func(blobs [][]byte) *client {
			*c.ended = true
			must.Succeed(c, c.server.Stop())
			for _, b := range blobs {
				hash, found := cas.SHA256.Sum(b).Hash(), 0
				err := filepath.WalkDir(filepath.Join(c.dir, "files"), func(path string, e fs.DirEntry, err error) error {
					if err == nil && e.Type().IsRegular() && strings.Contains(filepath.ToSlash(path), hash[2:]) {
						found++
						err = os.Remove(path)
					}
					return err
				})
				must.Be(c, err == nil && found == 1, "%d files of blob %s in the store: %v", found, hash, err)
			}
			return c.own(bazelrun.ServerConfig{Dir: c.dir, NoJobs: true})
		}
	}
	return nil
}

func incompleteHit(c *client) {
	_, err := c.lookup(absentDigest(100))
	c.wantCode("GetActionResult of an unknown action", err, codes.NotFound)
	_, err = c.lookup(c.anAction())
	c.wantCode("GetActionResult of an action without a result", err, codes.NotFound)
	if c.server != nil {
		c = c.own(bazelrun.ServerConfig{NoJobs: true})
	}
	lose := c.losing()
	if lose == nil {
		absentOutputs(c) // the best that a client can do
		return
	}
	rs := c.referrals(512<<10, true)
	var actions []*repb.Digest
	var victims [][]byte
	for _, r := range rs {
		action := c.anAction()
		if err := c.record(action, r.result); err != nil {
			c.Fatalf("UpdateActionResult with %s: %v", r.by, err)
		}
		expect.Error(c, expect.Err(c.lookup(action)), nil, "GetActionResult of a complete result with %s", r.by)
		actions, victims = append(actions, action), append(victims, r.victim)
	}
	kept := c.anAction()
	must.Succeed(c, c.record(kept, &repb.ActionResult{StdoutDigest: c.put(fresh(100))}))
	c = lose(victims)
	for i, r := range rs {
		_, err := c.lookup(actions[i])
		named := []string{actions[i].Hash, cas.SHA256.Sum(r.victim).Hash()}
		c.wantText(fmt.Sprintf("GetActionResult where %s is lost", r.by), err, named, codes.NotFound)
	}
	_, err = c.lookup(kept)
	c.wantCode("GetActionResult of a complete result", err, codes.OK)
}

func hitStays(c *client) {
	const lease, budget = 5 * time.Second, 12 << 20
	c = c.own(bazelrun.ServerConfig{NoJobs: true, MaxSize: fmt.Sprint(budget), Args: []string{"--lease", lease.String()}})
	for try := 0; ; try++ {
		must.Be(c, try != 5, "the machine was too slow five times")
		if try > 0 {
			time.Sleep(lease) // until the leases have ended
		}
		rs := c.referrals(50_000, true)
		merged := &repb.ActionResult{}
		var blobs []*repb.Digest
		for i, r := range rs {
			for _, d := range r.result.OutputDirectories {
				d.Path = fmt.Sprint("dir", i)
			}
			proto.Merge(merged, r.result)
			blobs = append(blobs, cas.SHA256.Sum(r.victim).Proto())
		}
		action := c.anAction()
		must.Succeed(c, c.record(action, merged))
		var others []*repb.Digest
		for range 4 {
			others = append(others, c.put(fresh(400_000)))
		}
		time.Sleep(lease + 1100*time.Millisecond) // until all leases have ended; they are kept in whole seconds, rounded up
		asked := time.Now()
		if _, err := c.lookup(action); err != nil {
			c.Fatalf("GetActionResult: %v", err)
		}
		_, refused, _ := c.tryFill(seeded(uint64(try)), 400_000, 4*budget)
		var lost []string
		for i, d := range blobs {
			if _, _, err := c.read(c.readName(d), 0, 0); err != nil {
				lost = append(lost, rs[i].by)
			}
		}
		if time.Since(asked) >= lease {
			continue // the lease has ended
		}
		must.Be(c, refused != nil, "the store was not full within the lease of a cache hit")
		expect.That(c, len(lost) == 0, "blobs evicted within the lease of a cache hit: %s", strings.Join(lost, ", "))
		if missing, err := c.absent(c.Context(), others...); err != nil || len(missing) == 0 {
			c.Errorf("no blob without a lease was evicted from a full store: %v", err)
		}
		return
	}
}

func inlining(c *client) {
	out, errors, a, b := fresh(100), fresh(200), fresh(300), fresh(400)
	action := c.anAction()
	err := c.record(action, &repb.ActionResult{
		StdoutDigest: c.put(out), StderrDigest: c.put(errors),
		OutputFiles: []*repb.OutputFile{{Path: "a", Digest: c.put(a)}, {Path: "b/c", Digest: c.put(b)}},
	})
	must.Succeed(c, err)
	r, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{
		InstanceName: c.instance, ActionDigest: action,
		InlineStdout: true, InlineStderr: true, InlineOutputFiles: []string{"a", "nothing"},
	})
	must.Be(c, err == nil && len(r.GetOutputFiles()) == 2,
		"GetActionResult: got %d output files, %v", len(r.GetOutputFiles()), err)
	for _, x := range []struct {
		what string
		raw  []byte
		d    *repb.Digest
		want []byte
	}{
		{"stdout", r.StdoutRaw, r.StdoutDigest, out},
		{"stderr", r.StderrRaw, r.StderrDigest, errors},
		{"output file a", r.OutputFiles[0].GetContents(), r.OutputFiles[0].GetDigest(), a},
	} {
		if string(x.raw) != string(x.want) && (len(x.raw) > 0 || c.ours) {
			c.Errorf("%s, to be inlined: got %s, want %s", x.what, brief(x.raw), brief(x.want))
		}
		expect.That(c, x.d.GetHash() == cas.SHA256.Sum(x.want).Hash(),
			"%s, inlined: got digest %s, want that of the contents", x.what, name(x.d))
	}
	if got := r.OutputFiles[1]; len(got.GetContents()) > 0 && c.ours {
		c.Errorf("output file b/c: got %s, want no inlined contents", brief(got.GetContents()))
	}
	inlineMany(c)
}

// inlineMany checks rule 64 on a result that is too large to inline: 20,000 files of 1 KiB.
func inlineMany(c *client) {
	const n = 20_000
	var blobs [][]byte
	for range n {
		blobs = append(blobs, fresh(1024))
	}
	out := fresh(2000)
	r := &repb.ActionResult{StdoutDigest: c.put(out)}
	var paths []string
	for i, d := range c.putAll(blobs) {
		paths = append(paths, fmt.Sprintf("out/%05d", i))
		r.OutputFiles = append(r.OutputFiles, &repb.OutputFile{Path: paths[i], Digest: d})
	}
	action := c.anAction()
	if err := c.record(action, r); err != nil {
		c.Fatalf("UpdateActionResult with %d output files, a message of %d bytes: %v", n, proto.Size(r), err)
	}
	// A reply above 4 MiB would fail the call.
	got, err := c.ac.GetActionResult(c.Context(), &repb.GetActionResultRequest{
		InstanceName: c.instance, ActionDigest: action, InlineStdout: true, InlineOutputFiles: paths,
	})
	if err != nil || len(got.GetOutputFiles()) != n {
		c.Errorf("GetActionResult with %d files to inline: got %d, %v", n, len(got.GetOutputFiles()), err)
		return
	}
	inlined := 0
	for i, f := range got.OutputFiles {
		if f.GetDigest().GetHash() == "" || len(f.GetContents()) > 0 && string(f.Contents) != string(blobs[i]) {
			c.Fatalf("output file %s: got digest %s and contents %s, want matching ones", f.GetPath(), name(f.GetDigest()),
				brief(f.GetContents()))
		}
		if len(f.GetContents()) > 0 {
			inlined++
		}
	}
	if c.ours && string(got.StdoutRaw) != string(out) {
		c.Error("stdout is not inlined, want it inlined before files")
	}
	c.Logf("of %d files to inline, %d were inlined in a reply of %d bytes", n, inlined, proto.Size(got))
}

func refusedUpdates(c *client) {
	updateAndLookup(c)
	c.forCallers(func(c *client, _ bool) { updateAndLookup(c) })
}

// updateAndLookup checks that updates behave as advertised.
func updateAndLookup(c *client) {
	action, r := c.anAction(), &repb.ActionResult{StdoutDigest: c.put(fresh(10))}
	err := c.record(action, r)
	if updates.met(c) {
		c.wantCode("UpdateActionResult with update_enabled true", err, codes.OK)
		_, err = c.lookup(action)
		c.wantCode("GetActionResult after that", err, codes.OK)
		return
	}
	c.wantCode("UpdateActionResult with update_enabled false", err, codes.PermissionDenied, refusals...)
	_, err = c.lookup(action)
	c.wantCode("GetActionResult after a rejected update", err, codes.NotFound)
}

func badResults(c *client) {
	d := c.put(fresh(10))
	file := func(path string, d *repb.Digest) *repb.ActionResult {
		return &repb.ActionResult{OutputFiles: []*repb.OutputFile{{Path: path, Digest: d}}}
	}
	tree := func(d *repb.Digest) *repb.ActionResult {
		return &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{{Path: "a", TreeDigest: d}}}
	}
	malformed := &repb.Digest{Hash: "xyz", SizeBytes: 10}
	for what, r := range map[string]*repb.ActionResult{
		"an absolute path":                          file("/etc/passwd", d),
		"a path outside the working directory":      file("a/../../b", d),
		"no path":                                   file("", d),
		"a path that ends in a slash":               file("a/", d),
		"a path that leaves a directory":            file("a/../b", d),
		"a path with a dot":                         file("./a", d),
		"a path with an empty segment":              file("a//b", d),
		"a path with a NUL":                         file("a\x00b", d),
		"an output file without a digest":           file("a", nil),
		"a malformed output digest":                 file("a", malformed),
		"a negative output size":                    file("a", &repb.Digest{Hash: d.Hash, SizeBytes: -1}),
		"a malformed stdout digest":                 {StdoutDigest: malformed},
		"a malformed stderr digest":                 {StderrDigest: malformed},
		"a malformed Tree digest":                   tree(malformed),
		"an output directory without digest":        tree(nil),
		"a malformed Tree":                          tree(c.put([]byte("no Tree\xff" + uuid()))),
		"a symlink without a target":                {OutputSymlinks: []*repb.OutputSymlink{{Path: "a"}}},
		"a symlink outside the working directory":   {OutputSymlinks: []*repb.OutputSymlink{{Path: "../a", Target: "b"}}},
		"a file symlink at an absolute path":        {OutputFileSymlinks: []*repb.OutputSymlink{{Path: "/a", Target: "b"}}},
		"a directory symlink at an absolute path":   {OutputDirectorySymlinks: []*repb.OutputSymlink{{Path: "/a", Target: "b"}}},
		"a directory outside the working directory": {OutputDirectories: []*repb.OutputDirectory{{Path: "../a", TreeDigest: d}}},
		"stdout_raw that does not match its digest": {StdoutRaw: []byte("x"), StdoutDigest: d},
		"contents that do not match their digest":   {OutputFiles: []*repb.OutputFile{{Path: "a", Digest: d, Contents: []byte("x")}}},
	} {
		action := c.anAction()
		c.wantCode("UpdateActionResult with "+what, c.record(action, r), codes.InvalidArgument)
		_, err := c.lookup(action)
		c.wantCode("GetActionResult after UpdateActionResult with "+what, err, codes.NotFound)
	}
	whole := &repb.ActionResult{OutputDirectories: []*repb.OutputDirectory{{TreeDigest: cas.SHA256.Sum(nil).Proto()}}}
	c.wantCode("UpdateActionResult with the working directory as output", c.record(c.anAction(), whole), codes.OK,
		codes.InvalidArgument)
	c.wantCode("UpdateActionResult without a result", c.record(c.anAction(), nil), codes.InvalidArgument)
	c.wantCode("UpdateActionResult of a malformed action", c.record(malformed, &repb.ActionResult{StdoutDigest: d}),
		codes.InvalidArgument)
	// The Action itself may be absent.
	c.wantCode("UpdateActionResult of an absent Action", c.record(absentDigest(100), &repb.ActionResult{StdoutDigest: d}),
		codes.OK, codes.FailedPrecondition)
}

func absentOutputs(c *client) {
	for _, r := range c.referrals(1000, false) {
		action := c.anAction()
		err := c.record(action, r.result)
		what := fmt.Sprintf("UpdateActionResult where %s is absent", r.by)
		if c.wantText(what, err, []string{"upload", cas.SHA256.Sum(r.victim).Hash()}, codes.FailedPrecondition, codes.OK); err != nil {
			continue
		}
		_, err = c.lookup(action)
		c.wantCode("GetActionResult after "+what, err, codes.NotFound)
	}
}

func failedResults(c *client) {
	action := c.anAction()
	r := &repb.ActionResult{StdoutDigest: c.put(fresh(10))}
	for _, code := range []int32{-1, 137} {
		r.ExitCode = code
		err := c.record(c.anAction(), r)
		c.wantText(fmt.Sprintf("UpdateActionResult with exit_code %d", code), err, []string{fmt.Sprint(code)}, codes.InvalidArgument, codes.OK,
			codes.FailedPrecondition, codes.PermissionDenied)
	}
	r.ExitCode = 1
	err := c.record(action, r)
	c.wantCode("UpdateActionResult with exit_code 1", err, codes.InvalidArgument, codes.OK, codes.FailedPrecondition,
		codes.PermissionDenied)
	got, lookupErr := c.lookup(action)
	switch {
	case err != nil:
		c.wantCode("GetActionResult after a rejected failure", lookupErr, codes.NotFound)
	case lookupErr == nil && got.ExitCode != 1:
		c.Errorf("GetActionResult after an accepted update with exit_code 1: got exit_code %d", got.ExitCode)
	}
	if !execution.met(c) {
		return
	}
	if a := c.request(action, nil); a.response.GetCachedResult() && a.response.GetResult().GetExitCode() != 0 {
		c.Errorf("Execute returned a failure that a client recorded: %v, %v", a.response, a.err)
	}
}

func resultsApart(c *client) {
	cmd := c.putProto(&repb.Command{Arguments: []string{"/bin/true", uuid()}})
	salted := func(salt string) *repb.Digest {
		return c.putProto(&repb.Action{
			CommandDigest: cmd, InputRootDigest: c.putProto(&repb.Directory{}),
			Salt: []byte(salt),
		})
	}
	out := c.put(fresh(10))
	action := salted("a")
	_, err := c.ac.UpdateActionResult(c.Context(), &repb.UpdateActionResultRequest{
		InstanceName: c.instance, ActionDigest: action,
		ActionResult: &repb.ActionResult{StdoutDigest: out}, ResultsCachePolicy: &repb.ResultsCachePolicy{Priority: 0},
	})
	c.wantCode("UpdateActionResult", err, codes.OK)
	got, err := c.lookup(action)
	expect.That(c, err == nil && got.GetStdoutDigest().GetHash() == out.Hash,
		"GetActionResult: got stdout %s, %v, want %s", name(got.GetStdoutDigest()), err, name(out))
	_, err = c.lookup(salted("b"))
	c.wantCode("GetActionResult of the same action with another salt", err, codes.NotFound)
	for _, v := range []repb.DigestFunction_Value{repb.DigestFunction_BLAKE3, repb.DigestFunction_SHA256TREE} {
		if slices.Contains(c.caps.GetCacheCapabilities().GetDigestFunctions(), v) {
			_, err := c.ac.GetActionResult(c.Context(),
				&repb.GetActionResultRequest{InstanceName: c.instance, DigestFunction: v, ActionDigest: action})
			c.wantCode(fmt.Sprintf("GetActionResult of the same hash as %v", v), err, codes.NotFound)
		}
	}
	other := *c
	other.instance = strings.TrimPrefix(c.instance+"/other-"+uuid(), "/")
	_, err = other.lookup(action)
	c.wantCode("GetActionResult from another instance", err, codes.NotFound, codes.InvalidArgument, codes.PermissionDenied)
	// The later result wins.
	second := c.put(fresh(20))
	c.wantCode("UpdateActionResult again", c.record(action, &repb.ActionResult{StdoutDigest: second}), codes.OK)
	got, err = c.lookup(action)
	if hash := got.GetStdoutDigest().GetHash(); err != nil || hash != second.Hash && (c.ours || hash != out.Hash) {
		c.Errorf("GetActionResult after two updates: got stdout %s, %v", name(got.GetStdoutDigest()), status.Code(err))
	}
}
