// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"archive/tar"
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func put(t *testing.T, s cas.Store, data string) cas.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, []byte(data)))(t)
}

func putMessage(t *testing.T, s cas.Store, m proto.Message) cas.Digest {
	t.Helper()
	return must.Get(cas.PutProto(t.Context(), s, cas.SHA256, m))(t)
}

func TestVisible(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"plain <b>\tünï", "plain <b>\tünï"},
		{"\x1b[31mred\x1b[0m", "red"},
		{"\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link", "textlink"},
		{"\x1bMup\x1b", `up\x1b`},
		{"\x1b(B\x1b[mreset", "reset"},
		{"a\u202eb\x00\x7f\u009b", `a\u202eb\x00\x7f\u009b`},
		{"\xff\xfe1", `\xff\xfe1`},
		{"\ufffd", `\ufffd`},
	} {
		expect.Equal(t, Visible(c.in), c.want, "%q", c.in)
	}
}

// A blob is shown as the kind that it appears to be, unless a link selects another.
func TestKinds(t *testing.T) {
	s := castest.NewMemory()
	file := put(t, s, "x")
	dir := &repb.Directory{Files: []*repb.FileNode{{Name: "a\n\x1b[2J", Digest: file.Proto(), IsExecutable: true}}}
	result := &repb.ActionResult{ExitCode: 3, StdoutDigest: file.Proto(), OutputFiles: []*repb.OutputFile{{Path: "o", Digest: file.Proto()}}}
	action := &repb.Action{CommandDigest: file.Proto(), InputRootDigest: file.Proto()}
	response := must.Get(proto.Marshal(&repb.ExecuteResponse{Result: result, Message: "m"}))(t)
	historical := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), must.Get(proto.Marshal(file.Proto()))(t))
	historical = protowire.AppendBytes(protowire.AppendTag(historical, 3, protowire.BytesType), response)
	for _, c := range []struct {
		blob       cas.Digest
		as         string
		kind, want string
	}{
		{putMessage(t, s, dir), "", Directory, `a\n`},
		{putMessage(t, s, &repb.Tree{Root: dir, Children: []*repb.Directory{dir}}), "", Tree, "1 directories"},
		{putMessage(t, s, action), "", Action, "input root"},
		{putMessage(t, s, &repb.Command{Arguments: []string{"/bin/sh", "a b"}}), "", Command, "/bin/sh 'a b'"},
		{putMessage(t, s, result), Result, Result, "exit code"},
		{put(t, s, string(response)), Response, Response, "output o"},
		{put(t, s, string(historical)), Historical, Historical, "output o"},
		{put(t, s, "one\ntwo\x1b[1m\n"), "", Text, "[one two]"},
		{put(t, s, ""), "", Text, "[]"},
		{put(t, s, "<html><script>alert(1)</script>"), "", Text, "<script>"},
		{put(t, s, "\x7fELF\x02\x01\x01\x00"), "", Binary, "elf"},
		{put(t, s, "\xff\xfe\x00\x01"), "", Binary, "ff fe 00 01"},
		{put(t, s, "\xff\xfe\x00\x01"), Text, Text, `\xff\xfe\x00\x01`},
		{putMessage(t, s, dir), Binary, Binary, "00000000"},
	} {
		b := must.Get(Read(t.Context(), s, c.blob, c.as))(t)
		expect.Equal(t, b.Kind, c.kind)
		for i := range b.Entries {
			b.Entries[i].Path = "" // unchanged, for links
		}
		text := fmt.Sprintf("%v", *b)
		expect.Text(t, text, c.want)
		control := strings.ContainsFunc(text, func(r rune) bool { return r != '\t' && unicode.IsControl(r) })
		expect.That(t, !control, "control characters in %q", text)
	}
}

func TestErrors(t *testing.T) {
	s := castest.NewMemory()
	_, err := Read(t.Context(), s, cas.SHA256.Sum([]byte("absent")), "")
	expect.Error(t, err, cas.ErrNotFound)
	for kind, data := range map[string]string{Action: "text", Directory: "\xff", Historical: "\x08\x01", "html": "x"} {
		_, err = Read(t.Context(), s, put(t, s, data), kind)
		expect.Error(t, err, cas.ErrInvalid, "%s", kind)
	}
	large := must.Get(cas.NewDigest(cas.SHA256, strings.Repeat("0", 64), 1<<40))(t)
	_, err = Read(t.Context(), s, large, Tree)
	expect.Error(t, err, cas.ErrInvalid)
}

// A page shows only the beginning of large texts, long lines and large directories, and says so.
func TestShownPartsAreBounded(t *testing.T) {
	s := castest.NewMemory()
	dir := &repb.Directory{}
	for i := range MaxRows + 1 {
		dir.Symlinks = append(dir.Symlinks, &repb.SymlinkNode{Name: fmt.Sprint(i), Target: "t"})
	}
	for _, d := range []cas.Digest{
		put(t, s, strings.Repeat("x", 1<<21)), put(t, s, strings.Repeat("\n", 1<<20)), put(t, s, strings.Repeat("\x00", 1<<20)),
		putMessage(t, s, dir), putMessage(t, s, &repb.Command{Arguments: []string{"a"}, OutputPaths: slices.Repeat([]string{"o"}, 2000)}),
	} {
		b := must.Get(Read(t.Context(), s, d, ""))(t)
		n := len(b.Entries) + len(b.Fields) + len(b.Dump)
		expect.That(t, b.Note != "" && n <= MaxRows && len(b.Lines) <= maxLines && len(strings.Join(b.Lines, "")) <= MaxShown,
			"%s: note %q, %d rows, %d lines", b.Kind, b.Note, n, len(b.Lines))
	}
}

func TestArchivesListMembers(t *testing.T) {
	s := castest.NewMemory()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must.Succeed(t, w.WriteHeader(&tar.Header{Name: "<i>\x1b[1m", Mode: 0o600, Size: 1}))
	must.Get(w.Write([]byte("x")))(t)
	must.Succeed(t, w.Close())
	blob := must.Get(Read(t.Context(), s, put(t, s, b.String()), ""))(t)
	expect.That(t, len(blob.Members) == 1 && blob.Members[0].Name == "<i>" && slices.Contains(blob.Members[0].Fields, "mode 0600"), "%+v", blob.Members)
	damaged := must.Get(Read(t.Context(), s, put(t, s, b.String()[:1024]+strings.Repeat("junk", 300)), ""))(t)
	expect.That(t, damaged.Kind == Binary && len(damaged.Members) == 0 && damaged.Note != "", "%+v", damaged)
}

func TestLinksOfBuildbarnsBrowser(t *testing.T) {
	hash := strings.Repeat("a", 64)
	for path, want := range map[string]string{
		"/blobs/sha256/action/" + hash + "-4/":              " action " + hash + "/4 ",
		"/a/b/blobs/sha256/tree/" + hash + "-4/dir/sub/":    "a/b tree " + hash + "/4 dir/sub/",
		"/blobs/blake3/file/" + hash + "-4/name":            " file blake3:" + hash + "/4 name",
		"/x/blobs/sha256/" + Historical + "/" + hash + "-1": "x " + Historical + " " + hash + "/1 ",
		"/a/" + hash + "-4":                                 "no link",
		"/blobs/sha256/action/":                             "malformed",
		"/blobs/sha256/action/" + hash + "-x/":              "malformed",
		"/blobs/sha256/action/" + hash[1:] + "-4/":          "malformed",
		"/blobs/rot13/action/" + hash + "-4/":               "malformed",
		"/blobs/sha256/html/" + hash + "-4/":                "malformed",
		"/uploads/blobs/sha256/action/" + hash + "-4/":      "malformed",
	} {
		l, ok, err := ParseLink(path)
		got := fmt.Sprintf("%s %s %s %s", l.Instance, l.Kind, l.Blob, l.Rest)
		if !ok {
			got = "no link"
		} else if err != nil {
			expect.Error(t, err, cas.ErrInvalid)
			got = "malformed"
		}
		expect.Equal(t, got, want, "%s", path)
	}
}

// Of an archive that cannot be copied, or is too large for it, a page shows the beginning.
func TestArchivesThatCannotBeCopied(t *testing.T) {
	s := castest.NewMemory()
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "absent"))
	data := []byte("PK\x03\x04" + strings.Repeat("x", 9<<20))
	for _, size := range []int64{int64(len(data)), maxArchive + 1} {
		d := cas.SHA256.Sum(data)
		b := &Blob{Digest: must.Get(cas.NewDigest(cas.SHA256, d.Hash(), size))(t), Format: "zip"}
		must.Succeed(t, b.members(t.Context(), s))
		expect.That(t, b.Note != "", "%d bytes: no note", size)
	}
	blob := must.Get(Read(t.Context(), s, put(t, s, string(data)), ""))(t)
	expect.That(t, blob.Note != "" && len(blob.Dump) > 0, "%+v", blob)
}
