// SPDX-License-Identifier: Apache-2.0

package assetservice

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A fixture is the services over a store on disk.
type fixture struct {
	*testing.T
	*server
	cache *disk.Cache
	dir   string
}

func newFixture(t *testing.T, dir string) *fixture {
	t.Helper()
	cache := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 64 << 20, MaxFiles: 1 << 20}))(t)
	t.Cleanup(func() { cache.Close() })
	control := must.Get(diskctl.Serve(dir, cache, nil))(t)
	t.Cleanup(func() { control.Close() })
	return &fixture{t, &server{Config: Config{Instances: cache.Instance, Index: control.Index()}}, cache, dir}
}

func (f *fixture) put(fn cas.Function, b []byte) *repb.Digest {
	f.Helper()
	return must.Get(cas.PutBytes(f.Context(), must.Get(f.Instances("main"))(f).Store, fn, b))(f).Proto()
}

// tree stores the Directory with a file in a subdirectory, except for the named parts.
func (f *fixture) tree(content string, without ...string) (root *repb.Digest) {
	f.Helper()
	put := func(name string, b []byte) *repb.Digest {
		if slices.Contains(without, name) {
			return cas.SHA256.Sum(b).Proto()
		}
		return f.put(cas.SHA256, b)
	}
	encode := func(m *repb.Directory) []byte {
		b, _, err := cas.MarshalProto(cas.SHA256, m)
		must.Succeed(f, err)
		return b
	}
	file := put("file", []byte(content))
	sub := put("subdirectory", encode(&repb.Directory{Files: []*repb.FileNode{{Name: "f", Digest: file}}}))
	return put("root", encode(&repb.Directory{Directories: []*repb.DirectoryNode{{Name: "d", Digest: sub}}}))
}

func qualifiers(pairs ...string) (qs []*assetpb.Qualifier) {
	for p := range slices.Chunk(pairs, 2) {
		qs = append(qs, &assetpb.Qualifier{Name: p[0], Value: p[1]})
	}
	return qs
}

func (f *fixture) push(req *assetpb.PushBlobRequest) {
	f.Helper()
	req.InstanceName = "main"
	must.Get(f.PushBlob(f.Context(), req))(f)
}

func (f *fixture) fetchBlob(uris ...string) (*assetpb.FetchBlobResponse, error) {
	return f.FetchBlob(f.Context(), &assetpb.FetchBlobRequest{InstanceName: "main", Uris: uris})
}

// expectCode checks the code of an error and that its message has every text.
func expectCode(t *testing.T, what string, err error, code codes.Code, texts ...string) {
	t.Helper()
	expect.Code(t, err, code, "%s", what)
	for _, text := range texts {
		expect.That(t, strings.Contains(status.Convert(err).Message(), text),
			"%s: got %v, want it to contain %q", what, err, text)
	}
}

// TestFetchFindsWhatWasPushed: the newest asset of any URI, with equal qualifiers, instance, kind and digest function.
func TestFetchFindsWhatWasPushed(t *testing.T) {
	f := newFixture(t, t.TempDir())
	old, latest := f.put(cas.SHA256, []byte("old")), f.put(cas.SHA256, []byte("new"))
	other := f.put(cas.SHA1, []byte("sha1"))
	root := f.tree("x")
	qs := qualifiers("a", "1", "b", "2")
	f.push(&assetpb.PushBlobRequest{Uris: []string{"replaced"}, BlobDigest: latest})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"u", "v", "replaced"}, BlobDigest: old})
	start := time.Now()
	past, future := timestamppb.New(start.Add(-time.Hour)), timestamppb.New(start.Add(time.Hour))
	f.push(&assetpb.PushBlobRequest{Uris: []string{"w", "v"}, BlobDigest: latest})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"u"}, Qualifiers: qs, BlobDigest: latest})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"sha1"}, BlobDigest: other})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"later"}, BlobDigest: old, ExpireAt: future})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"expired"}, BlobDigest: old})
	f.push(&assetpb.PushBlobRequest{Uris: []string{"expired"}, BlobDigest: old, ExpireAt: past})
	must.Get(f.PushDirectory(t.Context(), &assetpb.PushDirectoryRequest{
		InstanceName: "main", Uris: []string{"u", "tree"}, RootDirectoryDigest: root,
	}))(t)
	const sha1, sha256 = repb.DigestFunction_SHA1, repb.DigestFunction_SHA256
	now := timestamppb.New(start)
	for _, test := range []struct {
		what       string
		uris       []string
		qualifiers []*assetpb.Qualifier
		oldest     *timestamppb.Timestamp
		function   repb.DigestFunction_Value
		uri        string // "" if nothing must be found
		want       *repb.Digest
	}{
		{"one URI", []string{"u"}, nil, nil, 0, "u", old},
		{"a URI pushed twice", []string{"replaced"}, nil, nil, 0, "replaced", old},
		{"any URI", []string{"absent", "u"}, nil, nil, 0, "u", old},
		{"the newest", []string{"u", "v", "u"}, nil, nil, 0, "v", latest},
		{"qualifiers", []string{"u"}, qs, nil, 0, "u", latest},
		{"their order", []string{"u"}, qualifiers("b", "2", "a", "1"), nil, 0, "u", latest},
		{"some of them", []string{"u"}, qs[:1], nil, 0, "", nil},
		{"another value", []string{"u"}, qualifiers("a", "1", "b", "3"), nil, 0, "", nil},
		{"other borders", []string{"u"}, qualifiers("a1", "", "b", "2"), nil, 0, "", nil},
		{"one not too old", []string{"u", "w"}, nil, now, 0, "w", latest},
		{"too old", []string{"u"}, nil, now, 0, "", nil},
		{"fresh, as Bazel demands without a checksum", []string{"w"}, nil, future, 0, "", nil},
		{"not expired", []string{"later"}, nil, nil, 0, "later", old},
		{"expired by a second push", []string{"expired"}, nil, nil, 0, "", nil},
		{"a directory", []string{"tree"}, nil, nil, 0, "", nil},
		{"a function", []string{"sha1"}, nil, nil, sha1, "sha1", other},
		{"another function", []string{"sha1"}, nil, nil, 0, "", nil},
		{"the default function", []string{"u"}, nil, nil, sha256, "u", old},
		{"nothing", []string{"absent"}, nil, nil, 0, "", nil},
	} {
		req := &assetpb.FetchBlobRequest{
			InstanceName: "main", Uris: test.uris, Qualifiers: test.qualifiers, OldestContentAccepted: test.oldest,
			DigestFunction: test.function,
		}
		m, err := f.FetchBlob(t.Context(), req)
		if test.want == nil {
			expectCode(t, test.what, err, codes.NotFound, `"main"`, "fetches nothing from origins")
		} else if err != nil || m.Uri != test.uri || !proto.Equal(m.BlobDigest, test.want) || m.DigestFunction == 0 {
			t.Errorf("%s: got %v, %v, want %s %v", test.what, m, err, test.uri, test.want)
		}
		req.InstanceName = "other"
		_, err = f.FetchBlob(t.Context(), req)
		expectCode(t, test.what+" of another instance", err, codes.NotFound)
	}
	m, err := f.FetchDirectory(t.Context(), &assetpb.FetchDirectoryRequest{InstanceName: "main", Uris: []string{"u"}})
	if err != nil || !proto.Equal(m.RootDirectoryDigest, root) || m.DigestFunction != repb.DigestFunction_SHA256 {
		t.Errorf("got %v, %v, want the directory %v", m, err, root)
	}
	_, err = f.FetchDirectory(t.Context(), &assetpb.FetchDirectoryRequest{InstanceName: "main", Uris: []string{"v"}})
	expectCode(t, "a blob as a directory", err, codes.NotFound)
}

// TestPushNeedsAllBlobs of the asset and of what it refers to.
func TestPushNeedsAllBlobs(t *testing.T) {
	f := newFixture(t, t.TempDir())
	asset, absent := f.put(cas.SHA256, []byte("asset")), cas.SHA256.Sum([]byte("absent")).Proto()
	whole := f.tree("whole")
	f.push(&assetpb.PushBlobRequest{
		Uris: []string{"u"}, BlobDigest: asset,
		ReferencesBlobs: []*repb.Digest{asset}, ReferencesDirectories: []*repb.Digest{whole},
	})
	for what, req := range map[string]*assetpb.PushBlobRequest{
		"blob":                 {BlobDigest: absent},
		"referenced blob":      {BlobDigest: asset, ReferencesBlobs: []*repb.Digest{asset, absent}},
		"referenced directory": {BlobDigest: asset, ReferencesDirectories: []*repb.Digest{whole, absent}},
	} {
		req.InstanceName, req.Uris = "main", []string{"u"}
		_, err := f.PushBlob(t.Context(), req)
		expectCode(t, "absent "+what, err, codes.FailedPrecondition, absent.Hash, "upload")
	}
	for _, name := range []string{"root", "subdirectory", "file"} {
		root := f.tree("without "+name, name)
		_, err := f.PushDirectory(t.Context(), &assetpb.PushDirectoryRequest{
			InstanceName: "main", Uris: []string{"d"}, RootDirectoryDigest: root,
		})
		expectCode(t, "a directory without its "+name, err, codes.FailedPrecondition, "upload")
	}
	_, err := f.PushDirectory(t.Context(), &assetpb.PushDirectoryRequest{
		InstanceName: "main", Uris: []string{"d"}, RootDirectoryDigest: f.put(cas.SHA256, []byte("\xff")),
	})
	expectCode(t, "a directory that is none", err, codes.InvalidArgument)
	_, err = f.FetchDirectory(t.Context(), &assetpb.FetchDirectoryRequest{InstanceName: "main", Uris: []string{"d"}})
	expectCode(t, "after refused pushes", err, codes.NotFound)
	m, err := f.fetchBlob("u")
	expect.That(t, err == nil && proto.Equal(m.BlobDigest, asset),
		"after refused pushes: got %v, %v, want the first asset", m, err)
}

// TestAssetsSurviveAKill: a copy of the store's files at the time of the answer, which is what a killed server leaves,
// has the asset.
func TestAssetsSurviveAKill(t *testing.T) {
	f := newFixture(t, t.TempDir())
	d := f.put(cas.SHA256, []byte("x"))
	f.push(&assetpb.PushBlobRequest{Uris: []string{"u"}, BlobDigest: d})
	left := t.TempDir()
	must.Succeed(t, os.Remove(f.dir+"/control"))
	must.Succeed(t, os.CopyFS(left, os.DirFS(f.dir)))
	again := newFixture(t, left)
	m, err := again.fetchBlob("u")
	expect.That(t, err == nil && proto.Equal(m.BlobDigest, d), "got %v, %v, want %v", m, err, d)
}

// TestFetchRenewsLeases of the asset and everything it refers to. Assets that nobody fetches are evicted.
func TestFetchRenewsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cache := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20, MaxFiles: 1 << 20}))(t)
		defer cache.Close()
		f := &fixture{t, &server{Config: Config{Instances: cache.Instance}}, cache, ""}
		root := f.tree("used")
		unused := f.tree("unused")
		f.push(&assetpb.PushBlobRequest{
			Uris: []string{"used"}, BlobDigest: f.put(cas.SHA256, []byte("1")),
			ReferencesBlobs:       []*repb.Digest{f.put(cas.SHA256, []byte("referenced"))},
			ReferencesDirectories: []*repb.Digest{root},
		})
		f.push(&assetpb.PushBlobRequest{
			Uris: []string{"unused"}, BlobDigest: f.put(cas.SHA256, []byte("2")),
			ReferencesDirectories: []*repb.Digest{unused},
		})
		in := must.Get(cache.Instance("main"))(t)
		d := must.Get(cas.FromProto(cas.SHA256, root))(t)
		all := must.Get(cas.DirectoryClosure(t.Context(), in.Store, d))(t)
		for range 3 {
			time.Sleep(disk.DefaultLease * 9 / 10)
			must.Get(cache.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Second}))(t)
			must.Get(f.fetchBlob("used"))(t)
		}
		expect.Equal(t, len(must.Get(in.Store.Missing(t.Context(), all))(t)), 0)
		_, err := f.fetchBlob("unused")
		expectCode(t, "an asset that nobody uses", err, codes.NotFound)
	})
}

// TestIncompleteAssetsAreNotFound, but older ones of other URIs are.
func TestIncompleteAssetsAreNotFound(t *testing.T) {
	f := newFixture(t, t.TempDir())
	in := must.Get(f.Instances("main"))(t)
	whole := f.put(cas.SHA256, []byte("whole"))
	f.push(&assetpb.PushBlobRequest{Uris: []string{"whole"}, BlobDigest: whole})
	absent := cas.SHA256.Sum([]byte("absent")).Proto()
	record := func(uri string, r *repb.ActionResult) {
		t.Helper()
		must.Succeed(t, in.Actions.Record(t.Context(), key(cas.SHA256, blob, uri, nil), r))
	}
	for i, req := range []*assetpb.PushBlobRequest{
		{BlobDigest: absent},
		{BlobDigest: whole, ReferencesBlobs: []*repb.Digest{absent}},
		{BlobDigest: whole, ReferencesDirectories: []*repb.Digest{absent}},
		{BlobDigest: whole, ReferencesBlobs: []*repb.Digest{{Hash: "malformed"}}},
	} {
		d := must.Get(cas.FromProto(cas.SHA256, req.BlobDigest))(t)
		record("partial", encode(blob, d, req))
		_, err := f.fetchBlob("partial")
		expectCode(t, fmt.Sprint(i), err, codes.NotFound)
		expect.Equal(t, must.Get(f.fetchBlob("partial", "whole"))(t).Uri, "whole", "%d", i)
	}
	record("empty", &repb.ActionResult{})
	_, err := f.fetchBlob("empty")
	expectCode(t, "a result that is no asset", err, codes.NotFound)
}

// TestNoActionHasTheKeyOfAnAsset: executing an action cannot push.
func TestNoActionHasTheKeyOfAnAsset(t *testing.T) {
	b := keyText(blob, "u", nil)
	if _, _, n := protowire.ConsumeTag(b); n >= 0 {
		t.Errorf("%q may begin an encoded Action", b)
	}
}
