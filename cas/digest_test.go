// SPDX-License-Identifier: Apache-2.0

package cas_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

func ExampleFunction_Sum() {
	d := cas.SHA256.Sum([]byte("hello\n"))
	fmt.Println(d)
	fmt.Println(d.Resource())
	// Output:
	// 5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03/6
	// blobs/5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03/6
}

func TestDigestRejectsMalformed(t *testing.T) {
	hash := cas.SHA256.Sum(nil).Hash()
	for name, text := range map[string]string{
		"upper case": strings.ToUpper(hash) + "/0", "short": hash[1:] + "/0", "long": hash + "0/0", "negative": hash + "/-1",
		"sign": hash + "/+0", "leading zero": hash + "/00", "no size": hash, "no number": hash + "/x", "not hexadecimal": "g" + hash[1:] + "/0", "nothing": "",
	} {
		expect.Error(t, expect.Err(cas.ParseDigest(text)), cas.ErrInvalid, "%s", name)
	}
	expect.Error(t, expect.Err(cas.FromProto(cas.SHA256, nil)), cas.ErrInvalid, "unset")
}

func FuzzParseDigest(f *testing.F) {
	f.Add(cas.SHA256.Sum(nil).String())
	f.Add("sha256:" + cas.SHA256.Sum([]byte("x")).String())
	for _, function := range cas.Functions() {
		f.Add(function.Sum([]byte("x")).String())
		f.Add(function.Sum([]byte("x")).Resource())
	}
	f.Add("a/1")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := cas.ParseDigest(text)
		if err != nil {
			return
		}
		if again, err := cas.ParseDigest(d.String()); err != nil || again != d {
			t.Errorf("%q: got %v, then %v, %v", text, d, again, err)
		}
	})
}

// Rule 19.
func TestFunctionIsStatedOrInferred(t *testing.T) {
	all := &cas.Instance{}
	blake := &cas.Instance{Functions: []cas.Function{cas.BLAKE3, cas.SHA256}}
	for _, c := range []struct {
		in   *cas.Instance
		v    repb.DigestFunction_Value
		s    *repb.Digest
		want cas.Function
	}{
		{all, repb.DigestFunction_SHA256, nil, cas.SHA256},
		{all, repb.DigestFunction_UNKNOWN, cas.SHA256.Sum(nil).Proto(), cas.SHA256},
		{all, repb.DigestFunction_UNKNOWN, cas.BLAKE3.Sum(nil).Proto(), cas.SHA256},
		{all, repb.DigestFunction_BLAKE3, cas.BLAKE3.Sum(nil).Proto(), cas.BLAKE3},
		{all, repb.DigestFunction_UNKNOWN, cas.MD5.Sum(nil).Proto(), cas.MD5},
		{all, repb.DigestFunction_UNKNOWN, cas.GITSHA1.Sum(nil).Proto(), cas.SHA1},
		{all, repb.DigestFunction_UNKNOWN, cas.SHA384.Sum(nil).Proto(), cas.SHA384},
		{all, repb.DigestFunction_UNKNOWN, cas.SHA512.Sum(nil).Proto(), cas.SHA512},
		{all, repb.DigestFunction_UNKNOWN, nil, cas.SHA256},
		{all, repb.DigestFunction_UNKNOWN, &repb.Digest{Hash: "abc"}, 0},
		{all, repb.DigestFunction_VSO, nil, 0},
		{blake, repb.DigestFunction_UNKNOWN, cas.SHA256.Sum(nil).Proto(), cas.BLAKE3},
		{blake, repb.DigestFunction_SHA256, cas.SHA256.Sum(nil).Proto(), cas.SHA256},
		{blake, repb.DigestFunction_UNKNOWN, nil, cas.BLAKE3},
		{blake, repb.DigestFunction_MD5, cas.MD5.Sum(nil).Proto(), 0},
	} {
		got, err := c.in.FunctionOf(c.v, c.s)
		if got != c.want || (err != nil) != (c.want == 0) || err != nil && !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("FunctionOf(%v, %v) of %v: got %v, %v, want %v", c.v, c.s, c.in.Functions, got, err, c.want)
		}
	}
}

// TestFunctionsMatchOtherPrograms compares with the output of sha256sum, sha1sum, md5sum, sha384sum, sha512sum and git
// hash-object, and with the first test vector of BLAKE3.
func TestFunctionsMatchOtherPrograms(t *testing.T) {
	for f, want := range map[cas.Function]string{
		cas.SHA256:     "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03/6",
		cas.SHA1:       "f572d396fae9206628714fb2ce00f72e94f2258f/6",
		cas.MD5:        "b1946ac92492d2347c6235b4d2611184/6",
		cas.SHA384:     "1d0f284efe3edea4b9ca3bd514fa134b17eae361ccc7a1eefeff801b9bd6604e01f21f6bf249ef030599f0c218f2ba8c/6",
		cas.SHA512:     "e7c22b994c59d9cf2b48e549b1e24666636045930d3da7c1acb299d1c3b7f931f94aae41edda2c2b207a36e10f8bcb8d45223e54878f5b316e7ce3b6bc019629/6",
		cas.SHA256TREE: "sha256tree:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03/6",
		cas.GITSHA1:    "gitsha1:ce013625030ba8dba906f756967f9e9ca394464a/6",
	} {
		expect.Equal(t, f.Sum([]byte("hello\n")).String(), want, "%v", f)
	}
	const empty = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262/0"
	expect.Equal(t, cas.BLAKE3.Sum(nil).String(), empty)
	expect.Equal(t, len(cas.Functions()), 8, "functions")
}

// Rule 20. SHA256TREE equals SHA256 up to 1024 bytes.
func TestEqualHashesOfTwoFunctionsAreDifferentDigests(t *testing.T) {
	a, b := cas.SHA256.Sum([]byte("x")), cas.SHA256TREE.Sum([]byte("x"))
	expect.That(t, a.Hash() == b.Hash() && a != b && a.String() != b.String() && a.Resource() != b.Resource(),
		"got %v and %v, %s and %s, want them to differ", a, b, a.Resource(), b.Resource())
	expect.Equal(t, b.Resource(), "blobs/sha256tree/"+b.Hash()+"/1", "Resource")
}

func TestGitHashReset(t *testing.T) {
	h := cas.GITSHA1.New(6)
	h.Write([]byte("other"))
	h.Reset()
	h.Write([]byte("hello\n"))
	expect.Equal(t, cas.GITSHA1.Digest(h, 6), cas.GITSHA1.Sum([]byte("hello\n")), "after Reset")
}

func TestInstanceNames(t *testing.T) {
	for _, ok := range []string{"", "a", "a/b/c", "Blobs", "ünï", "a b", ".."} {
		expect.Error(t, cas.CheckInstanceName(ok), nil, "%q", ok)
	}
	for _, bad := range []string{"/", "a//b", "a/", "/a", "blobs", "a/uploads/b", "x/actionResults", "\xff", "a\x00", strings.Repeat("x", 257)} {
		expect.Error(t, cas.CheckInstanceName(bad), cas.ErrInvalid, "%q", bad)
	}
}

func TestVerifyFindsEveryDifference(t *testing.T) {
	d := cas.SHA256.Sum([]byte("hello"))
	for text, want := range map[string]error{"hello": nil, "hellO": cas.ErrCorrupt, "hell": cas.ErrCorrupt, "hello!": cas.ErrCorrupt, "": cas.ErrCorrupt} {
		expect.Error(t, expect.Err(io.ReadAll(cas.Verify(d, strings.NewReader(text)))), want, "%q", text)
	}
}

// TestLookupCompleteNeedsTheWholeClosure is rule 62: a hit with an absent blob is a miss.
func TestLookupCompleteNeedsTheWholeClosure(t *testing.T) {
	m := castest.NewMemory()
	in := &cas.Instance{Store: m, Actions: m}
	put := func(text string) cas.Digest {
		return must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, []byte(text)))(t)
	}
	file, stdout, stderr, leaf, inner := put("file"), put("stdout"), put("stderr"), put("leaf"), put("inner")
	sub := &repb.Directory{Files: []*repb.FileNode{{Name: "inner", Digest: inner.Proto()}}}
	subDigest := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, sub))(t)
	root := &repb.Directory{
		Files:       []*repb.FileNode{{Name: "leaf", Digest: leaf.Proto()}},
		Directories: []*repb.DirectoryNode{{Name: "sub", Digest: subDigest.Proto()}},
	}
	rootDigest := must.Get(cas.PutProto(t.Context(), m, cas.SHA256, root))(t)
	tree, err := cas.PutProto(t.Context(), m, cas.SHA256, &repb.Tree{Root: root, Children: []*repb.Directory{sub}})
	must.Succeed(t, err)
	action := cas.SHA256.Sum([]byte("action"))
	err = m.Record(t.Context(), action, &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "f", Digest: file.Proto()}},
		OutputDirectories: []*repb.OutputDirectory{{Path: "d", TreeDigest: tree.Proto(), RootDirectoryDigest: rootDigest.Proto()}},
		StdoutDigest:      stdout.Proto(), StderrDigest: stderr.Proto(),
	})
	must.Succeed(t, err)
	if _, err := cas.LookupComplete(t.Context(), in, action); err != nil {
		t.Fatalf("complete result: %v", err)
	}
	for name, d := range map[string]cas.Digest{
		"file": file, "stdout": stdout, "stderr": stderr, "Tree": tree, "file of the Tree": leaf,
		"file of a child": inner, "root Directory": rootDigest, "child Directory": subDigest,
	} {
		b := must.Get(cas.ReadAll(t.Context(), m, d, 1<<20))(t)
		m.Delete(d)
		_, err = cas.LookupComplete(t.Context(), in, action)
		expect.That(t, errors.Is(err, cas.ErrNotFound) && strings.Contains(err.Error(), d.String()),
			"without the %s: got %v, want ErrNotFound naming %s", name, err, d)
		must.Get(cas.PutBytes(t.Context(), m, cas.SHA256, b))(t)
	}
}

// The zero Digest and the zero Function are errors, and no panics.
func TestZeroDigestIsInvalid(t *testing.T) {
	ctx, m, none := t.Context(), castest.NewMemory(), cas.Function(0)
	if d := none.Sum([]byte("x")); !d.IsZero() {
		t.Errorf("Sum: got %v, want the zero Digest", d)
	}
	for name, call := range map[string]func() error{
		"ReadAll":   func() error { _, err := cas.ReadAll(ctx, m, cas.Digest{}, 10); return err },
		"ReadProto": func() error { return cas.ReadProto(ctx, m, cas.Digest{}, &repb.Action{}) },
		"PutBytes":  func() error { _, err := cas.PutBytes(ctx, m, none, []byte("x")); return err },
		"PutProto":  func() error { _, err := cas.PutProto(ctx, m, none, &repb.Action{}); return err },
		"PutSeeker": func() error { _, err := cas.PutSeeker(ctx, m, none, strings.NewReader("x")); return err },
		"PutAll":    func() error { return cas.PutAll(ctx, plain{m}, []cas.Blob{{Data: []byte("x")}})[0] },
		"Verify":    func() error { _, err := io.ReadAll(cas.Verify(cas.Digest{}, strings.NewReader("x"))); return err },
		"Batch.Add": func() error { return cas.NewBatch(m).Add(ctx, cas.Blob{}) },
		"Closure":   func() error { _, err := cas.DirectoryClosure(ctx, m, cas.Digest{}); return err },
	} {
		expect.Error(t, call(), cas.ErrInvalid, "%s", name)
	}
}

type plain struct{ cas.Store }

func TestDigestAsTextAndJSON(t *testing.T) {
	type record struct {
		D cas.Digest            `json:"d"`
		M map[cas.Digest]string `json:"m,omitempty"`
	}
	for _, f := range cas.Functions() {
		want := record{D: f.Sum([]byte("a")), M: map[cas.Digest]string{f.Sum(nil): "empty"}}
		text := must.Get(json.Marshal(want))(t)
		expect.Text(t, string(text), `"d":"`+want.D.String()+`"`, "%v (the text of String)", f)
		var got record
		if err := json.Unmarshal(text, &got); err != nil || got.D != want.D || !maps.Equal(got.M, want.M) {
			t.Errorf("%v: got %v, %v, want %v", f, got, err, want)
		}
	}
	expect.Equal(t, string(must.Get(json.Marshal(record{}))(t)), `{"d":""}`, "the zero Digest")
	kept := record{D: cas.SHA256.Sum(nil)}
	if err := json.Unmarshal([]byte(`{"d":""}`), &kept); err != nil || !kept.D.IsZero() {
		t.Errorf("empty text: got %v, %v, want the zero Digest", kept.D, err)
	}
	expect.Error(t, json.Unmarshal([]byte(`{"d":"xyz/1"}`), &kept), cas.ErrInvalid, "malformed text")
}
