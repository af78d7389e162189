// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"google.golang.org/protobuf/proto"
)

// Differences of stdout carry its name.
func TestLogDifferencesAreNamed(t *testing.T) {
	store := castest.NewMemory()
	r := &changes.Reader{Store: store}
	var entries [2]*changes.Entry
	for i, text := range []string{"one\n", "two\n"} {
		d := must.Get(cas.PutBytes(t.Context(), store, cas.SHA256, []byte(text)))(t)
		entries[i] = r.File("stdout", d, false)
	}
	var c Config
	all, err := c.explained(t.Context(), []changes.Change{{What: "stdout", EntryA: entries[0], EntryB: entries[1]}}, compare.Known{})
	if err != nil || len(all) != 1 || len(all[0].Differences) != 1 || all[0].Differences[0].Where[0] != "stdout" {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestMessagesAreRecognised, and texts are none.
func TestMessagesAreRecognised(t *testing.T) {
	d := cas.SHA256.Sum([]byte("x")).Proto()
	dir := &repb.Directory{
		Files:       []*repb.FileNode{{Name: "f", Digest: d, IsExecutable: true}},
		Directories: []*repb.DirectoryNode{{Name: "d", Digest: d}},
		Symlinks:    []*repb.SymlinkNode{{Name: "l", Target: "t"}},
	}
	for want, all := range map[string][]proto.Message{
		"action": {&repb.Action{CommandDigest: d, InputRootDigest: d}, &repb.Action{CommandDigest: d, InputRootDigest: cas.SHA256.Sum(nil).Proto(), DoNotCache: true}},
		"command": {
			&repb.Command{Arguments: []string{"/bin/sh", "-c", "x"}, OutputPaths: []string{"o"}},
			&repb.Command{Arguments: []string{"a"}, EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "A", Value: "b"}}},
		},
		"directory": {dir, &repb.Directory{}, &repb.Directory{Files: dir.Files}, &repb.Directory{Symlinks: dir.Symlinks}},
		"tree":      {&repb.Tree{Root: dir}, &repb.Tree{Root: &repb.Directory{}, Children: []*repb.Directory{dir}}, &repb.Tree{Root: &repb.Directory{Files: dir.Files}}},
	} {
		for _, m := range all {
			expect.Equal(t, MessageKind(must.Get(proto.Marshal(m))(t), cas.SHA256), want, "message in %v", m)
		}
	}
	for _, text := range []string{"a text\n", "\n\n", "{}", "\x7fELF\x02\x01\x01", "cloister-manifest v1\n", "#!/bin/sh\n", "\x00\x00"} {
		expect.Equal(t, MessageKind([]byte(text), cas.SHA256), "", "message in %q", text)
	}
}
