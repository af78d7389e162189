// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// large is a text that is mounted from the store instead of copied into the sandbox.
var large = strings.Repeat("0123456789abcdef", 8<<10)

// own returns node properties.
func own(mode uint32, s int64, ns int32) *repb.NodeProperties {
	return &repb.NodeProperties{Mtime: &timestamppb.Timestamp{Seconds: s, Nanos: ns}, UnixMode: wrapperspb.UInt32(mode)}
}

// nodeProperties runs an action three times, with the input tree in a new image, in a kept one, and again. The action
// must see the modes and times of its inputs, its outputs must keep theirs, and unreadable inputs must not matter.
func nodeProperties(c *client) {
	text, program, big := c.put([]byte("text")), c.put([]byte("#!/bin/sh\necho ran\n")), c.put([]byte(large+"own"))
	var many []*repb.FileNode
	for i := range 20 {
		many = append(many,
			&repb.FileNode{Name: fmt.Sprintf("m%02d", i), Digest: text, NodeProperties: own(0o604, int64(i), 0)})
	}
	closed := c.putProto(&repb.Directory{
		NodeProperties: own(0, 5, 0),
		Files: []*repb.FileNode{
			{Name: "big", Digest: big},
			{Name: "dated", Digest: big, NodeProperties: own(0, 6, 0)},
			{Name: "f", Digest: text, NodeProperties: own(0, 6, 0)},
		},
	})
	dir := c.putProto(&repb.Directory{
		NodeProperties: own(0o6711, 7, 8),
		Directories:    []*repb.DirectoryNode{{Name: "closed", Digest: closed}},
		Files:          append([]*repb.FileNode{{Name: "big", Digest: big, NodeProperties: own(0o754, 9, 0)}}, many...),
		Symlinks:       []*repb.SymlinkNode{{Name: "to", Target: "m00", NodeProperties: own(0, 1<<32, 0)}},
	})
	root := c.putProto(&repb.Directory{
		NodeProperties: own(0o500, 1, 0),
		Directories:    []*repb.DirectoryNode{{Name: "d", Digest: dir}},
		Files: []*repb.FileNode{
			{Name: "hidden", Digest: text, NodeProperties: own(0o600, -1, 999_999_999)},
			{Name: "old", Digest: text, NodeProperties: own(0o4604, 3, 0)},
			{Name: "tool", Digest: program, IsExecutable: true, NodeProperties: own(0o604, 4, 0)},
		},
	})
	cmd := &repb.Command{
		Arguments: []string{"/bin/sh", "-c", `stat -c '%a %.9Y %n' d d/big d/closed d/m07 d/to hidden old tool
			./tool; cat d/m07; cksum < d/big; cat hidden 2>/dev/null || echo hidden; cat d/closed/f 2>/dev/null || echo closed; rm old
			mkdir -p o/sub; echo 1 > o/sub/f; touch -d @77.25 o/sub/f; chmod 705 o/sub/f; chmod 0 o/sub; touch -d @78 o/sub 
			ln -s x o/l; touch -h -d @79 o/l; touch -d @80 o; chmod 701 o
			echo 2 > out; chmod 4640 out; touch -d @81.000000001 out; ln -s out link; touch -h -d @82 link`},
		OutputPaths: []string{"link", "o", "old", "out"}, OutputNodeProperties: []string{"mtime", "unix_mode"},
	}
	for range 3 {
		out, r := c.wantSuccess("node properties", c.request(c.prepare(job{command: cmd, root: root, same: true}), skip))
		for _, want := range []string{
			"711 7.000000008 d\n", "754 9.000000000 d/big\n", "0 5.000000000 d/closed\n", "604 7.000000000 d/m07\n",
			" 4294967296.000000000 d/to\n", "600 -0.000000001 hidden\n", "604 3.000000000 old\n", "715 4.000000000 tool\n",
			"ran\ntext", " 131075\nhidden\nclosed\n",
		} {
			expect.Text(c, out, want, "stdout")
		}
		expect.That(c, len(r.OutputFiles) == 1 && proto.Equal(r.OutputFiles[0].NodeProperties, own(0o640, 81, 1)),
			"got output files %v", r.OutputFiles)
		expect.That(c, len(r.OutputSymlinks) == 1 && r.OutputSymlinks[0].NodeProperties.GetMtime().GetSeconds() == 82,
			"got output symlinks %v", r.OutputSymlinks)
		must.Be(c, len(r.OutputDirectories) == 1, "got output directories %v", r.OutputDirectories)
		tree := c.decodeTree(r.OutputDirectories[0].TreeDigest)
		if len(tree.Children) != 1 || !proto.Equal(tree.Root.NodeProperties, own(0o701, 80, 0)) ||
			!proto.Equal(tree.Children[0].NodeProperties, own(0, 78, 0)) ||
			tree.Root.Symlinks[0].NodeProperties.GetMtime().GetSeconds() != 79 ||
			!proto.Equal(tree.Children[0].Files[0].NodeProperties, own(0o705, 77, 250_000_000)) {
			c.Errorf("got the Tree %v", tree)
		}
	}
	got := must.Get(repb.NewCapabilitiesClient(c.conn).GetCapabilities(c.Context(), &repb.GetCapabilitiesRequest{}))(c)
	expect.Slices(c, got.ExecutionCapabilities.SupportedNodeProperties, []string{"mtime", "unix_mode"},
		"supported_node_properties")
}
