// SPDX-License-Identifier: Apache-2.0

//go:build unix

package tree_test

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func withMode(mode uint32) *repb.NodeProperties {
	return &repb.NodeProperties{UnixMode: wrapperspb.UInt32(mode)}
}

func withTime(s int64, ns int32) *repb.NodeProperties {
	return &repb.NodeProperties{Mtime: &timestamppb.Timestamp{Seconds: s, Nanos: ns}}
}

func withBoth(mode uint32, s int64, ns int32) *repb.NodeProperties {
	p := withTime(s, ns)
	p.UnixMode = wrapperspb.UInt32(mode)
	return p
}

// propertied returns a tree in which inputs of all kinds and places have properties, and what a run must see.
func propertied(t testing.TB) (n *node, outputs []string, want map[string]string) {
	large := strings.Repeat("L", tree.LargeFile)
	n = parse(t, "f = 1", "plain = 1", "tool *= 2", "both *= 3", "suid = 4", "st_mode = 4", "ignored = 5", "zero = ",
		"old = 1901",
		"l -> f", "large = "+large, "d/f = 1", "d/sub/large = "+large, "d/sub/tool *= "+large+"x",
		"d/sub/plain = "+large,
		"d/sub/l -> x", "d/sub/a = 1", "d/sub/b = 1", "d/sub/c = 1", "d/closed/f = 1", "d/closed/large = "+large, "e/",
		"out/f = 6", "out/d/f = 7", "out/d/large = "+large, "w/f = 1")
	for p, own := range map[string]*repb.NodeProperties{
		"f": withBoth(0o640, 1, 5), "tool": withMode(0o700), "both": withMode(0o644), "suid": withMode(0o7755),
		"st_mode": withMode(0o100600), "zero": withBoth(0o600, 0, 0), "old": withTime(-1<<31, 0),
		"l": withBoth(0o600, 7, 7), "large": withTime(8, 0),
		"d": withBoth(0o750, 9, 999_999_999), "d/f": withTime(1<<33-1, 0), "d/sub/large": withBoth(0o666, 10, 0),
		"d/sub/tool": withTime(11, 0), "d/sub/l": withTime(12, 0), "d/closed": withMode(0),
		"d/closed/large": withMode(0), "e": withBoth(0o711, 13, 0),
		"out": withBoth(0o500, 14, 0), "out/f": withBoth(0o400, 15, 0), "out/d": withTime(16, 0),
		"out/d/large": withMode(0o604), "w": withBoth(0o700, 17, 0),
		"ignored": {Properties: []*repb.NodeProperty{
			{Name: "bazel_tool_input"},
			{Name: "mtime", Value: "x"},
			{Name: "unix_mode"},
		}},
	} {
		n.at(p).own = own
	}
	return n, []string{"out", "w/out"}, map[string]string{
		"f": "-rw-r----- 1.000000005", "plain": "-rw-r--r-- 1000000000.000000000",
		"tool": "-rwx--x--x 1000000000.000000000",
		"both": "-rwxr-xr-x 1000000000.000000000", "suid": "-rwxr-xr-x 1000000000.000000000",
		"st_mode": "-rw------- 1000000000.000000000",
		"ignored": "-rw-r--r-- 1000000000.000000000", "zero": "-rw------- 0.000000000",
		"old": "-rw-r--r-- -2147483648.000000000",
		"l":   "Lrwxrwxrwx 7.000000007", "large": "-rw-r--r-- 8.000000000", "d": "drwxr-x--- 9.999999999",
		"d/f": "-rw-r--r-- 8589934591.000000000", "d/sub": "dtrwxrwxrwx 1000000000.000000000",
		"d/sub/large": "-rw-r--r-- 10.000000000",
		"d/sub/tool":  "-rwxr-xr-x 11.000000000", "d/sub/plain": "-rw-r--r-- 1000000000.000000000",
		"d/sub/l":  "Lrwxrwxrwx 12.000000000",
		"d/closed": "d--------- 1000000000.000000000", "d/closed/f": "-rw-r--r-- 1000000000.000000000",
		"d/closed/large": "---------- 1000000000.000000000", "e": "drwx--x--x 13.000000000",
		// Writable directories keep the mode that the run needs.
		"out": "drwxrwxrwx 14.000000000", "out/f": "-r-------- 15.000000000", "out/d": "drwxrwxrwx 16.000000000",
		"out/d/large": "-rw----r-- 1000000000.000000000", "w": "dtrwxrwxrwx 17.000000000",
	}
}

// facts returns the mode and the time that a run sees of p; root is its exec root without binds.
func facts(t testing.TB, ws, root *os.Root, s *tree.Staged, p string) string {
	t.Helper()
	info, err := root.Lstat(p)
	for _, b := range s.Binds {
		switch {
		case p != b.Target:
		case filepath.IsAbs(b.Source):
			info, err = os.Lstat(b.Source)
		default:
			info, err = ws.Lstat(b.Source)
		}
	}
	if os.Getuid() != 0 && errors.Is(err, fs.ErrPermission) {
		return "hidden" // by the mode of its parent
	}
	must.Succeed(t, err)
	return fmt.Sprintf("%v %d.%09d", info.Mode(), info.ModTime().Unix(), info.ModTime().Nanosecond())
}

func TestRule098_NodePropertiesOfInputsAreApplied(t *testing.T) {
	for name, store := range map[string]cas.Store{
		"copied": castest.NewMemory(), "large files bound": newFiler(t), "filer full": fullFiler{castest.NewMemory()},
	} {
		t.Run(name, func(t *testing.T) {
			n, outputs, want := propertied(t)
			l := plan(t, load(t, store, n), "", outputs, nil)
			ws := newRoot(t)
			s := must.Get(l.Stage(t.Context(), store, ws))(t)
			defer s.Release()
			out := must.Get(ws.OpenRoot("out"))(t)
			defer out.Close()
			checkFacts(t, want, func(p string) string { return facts(t, ws, out, s, p) })
			if os.Getuid() != 0 {
				return // cannot count the files in d/closed
			}
			bytes, files := l.SizeEstimate(store)
			if _, ok := store.(fullFiler); ok {
				bytes, files = taken(t, ws, s) // known only after the failure of the Filer
			}
			if b, f := taken(t, ws, s); b != bytes || f != files {
				t.Errorf("SizeEstimate: got %d bytes in %d files, Stage took %d in %d", bytes, files, b, f)
			}
		})
	}
}

func checkFacts(t *testing.T, want map[string]string, got func(string) string) {
	t.Helper()
	for p, want := range want {
		got := got(p)
		if p == "d/sub/plain" { // only the mode of the store's file is known
			got, want = got[:10], want[:10]
		}
		expect.That(t, got == want || got == "hidden", "%s: got %s, want %s", p, got, want)
	}
}

func TestRule098_BadNodePropertiesAreRefused(t *testing.T) {
	for _, c := range []struct {
		own  *repb.NodeProperties
		want string
	}{
		{withTime(-1<<31-1, 0), "mtime"},
		{withTime(1<<33, 0), "mtime"},
		{withTime(math.MaxInt64, 0), "mtime"},
		{withTime(0, -1), "mtime"},
		{withTime(0, 1e9), "mtime"},
		{withMode(0o200000), "unix_mode"},
		{withMode(math.MaxUint32), "unix_mode"},
	} {
		d := &repb.NodeProperties{}
		proto.Merge(d, c.own)
		for of, dir := range map[string]*repb.Directory{
			`file "a"`:      {Files: []*repb.FileNode{{Name: "a", Digest: empty, NodeProperties: d}}},
			`symlink "a"`:   {Symlinks: []*repb.SymlinkNode{{Name: "a", Target: "x", NodeProperties: d}}},
			`directory "."`: {NodeProperties: d},
		} {
			store := castest.NewMemory()
			bad := putProto(t, store, dir)
			_, err := tree.Load(t.Context(), store, putProto(t, store, parent("d", bad)))
			wantError(t, err, cas.ErrInvalid, of+": "+c.want)
			wantError(t, err, cas.ErrInvalid, bad.String())
		}
	}
}

// TestRule082_PropertiesOfOutputs checks that requested properties are in every message with a field for them, also for
// files made readable and for outputs inside others, and that other properties are not.
func TestRule082_PropertiesOfOutputs(t *testing.T) {
	make := func() *os.Root {
		out := execRoot(t, "d/closed/f = 1", "d/x *= 2", "d/l -> x", "f = 3", "l -> f", "late = 4", "early = 5")
		setTime := func(p string, s, ns int64) { must.Succeed(t, out.Chtimes(p, time.Unix(s, ns), time.Unix(s, ns))) }
		setTime("d/closed/f", 11, 1)
		setTime("d/closed", 12, 0)
		setTime("d/x", 13, 0)
		setTime("d", 14, 0)
		setTime("f", 15, 5)
		setTime("late", 1<<33, 0)
		setTime("early", -1<<31-1, 0)
		for _, m := range []struct {
			path string
			mode fs.FileMode
		}{
			{"d/closed/f", 0},
			{"d/closed", 0},
			{"d/x", 0o711},
			{"f", 0o640 | fs.ModeSetuid},
			{"late", 0o600},
			{"early", 0o600},
		} {
			must.Succeed(t, out.Chmod(m.path, m.mode))
		}
		return out
	}
	wanted := tree.OutputSpec{
		Paths:      []string{"d", "d/closed", "d/closed/f", "early", "f", "l", "late"},
		Format:     repb.Command_TREE_AND_DIRECTORY,
		Properties: []string{"mtime", "unix_mode"},
	}
	store := castest.NewMemory()
	r := capture(t, store, make(), wanted)
	got := map[string]*repb.NodeProperties{}
	for _, f := range r.OutputFiles {
		got[f.Path] = f.NodeProperties
	}
	for _, l := range r.OutputSymlinks {
		got[l.Path] = l.NodeProperties
	}
	for _, o := range r.OutputDirectories {
		var m repb.Tree
		d := must.Get(cas.FromProto(cas.SHA256, o.TreeDigest))(t)
		must.Succeed(t, cas.ReadProto(t.Context(), store, d, &m))
		for i, dir := range append([]*repb.Directory{m.Root}, m.Children...) {
			at := fmt.Sprint(o.Path, ":", i)
			got[at] = dir.NodeProperties
			for _, f := range dir.Files {
				got[at+"/"+f.Name] = f.NodeProperties
			}
			for _, l := range dir.Symlinks {
				got[at+"/"+l.Name] = l.NodeProperties
			}
		}
		// Both formats agree, including properties.
		var root repb.Directory
		d = must.Get(cas.FromProto(cas.SHA256, o.RootDirectoryDigest))(t)
		must.Succeed(t, cas.ReadProto(t.Context(), store, d, &root))
		expect.That(t, proto.Equal(&root, m.Root),
			"%s: the root Directory is %v, the root of the Tree %v", o.Path, &root, m.Root)
		// The output of one action can be the input of another.
		must.Get(tree.Load(t.Context(), store, d))(t)
	}
	want := map[string]*repb.NodeProperties{
		"d:0": withBoth(0o755, 14, 0), "d:0/x": withBoth(0o711, 13, 0), "d:1": withBoth(0, 12, 0),
		"d:1/f":      withBoth(0, 11, 1),
		"d/closed:0": withBoth(0, 12, 0), "d/closed:0/f": withBoth(0, 11, 1), "d/closed/f": withBoth(0, 11, 1),
		"f": withBoth(0o640, 15, 5), "late": withBoth(0o600, 1<<33-1, 0), "early": withBoth(0o600, -1<<31, 0),
	}
	for p, w := range want {
		expect.That(t, proto.Equal(got[p], w), "%s: got %v, want %v", p, got[p], w)
	}
	for _, link := range []string{"l", "d:0/l"} {
		if p := got[link]; p.GetMtime() == nil || p.GetUnixMode().GetValue() != 0o777 {
			t.Errorf("%s: got %v, want mode 777 and a time", link, p)
		}
	}

	wanted.Properties = []string{"unix_mode"}
	if r := capture(t, store, make(), wanted); r.OutputFiles[0].NodeProperties.Mtime != nil ||
		r.OutputFiles[0].NodeProperties.UnixMode == nil {
		t.Errorf("only unix_mode: got %v", r.OutputFiles[0])
	}
	wanted.Properties = nil
	plain := capture(t, store, make(), wanted)
	expect.That(t, !strings.Contains(plain.String(), "node_properties"), "no properties requested: got %v", plain)
	later := make()
	must.Succeed(t, later.Chtimes("d/x", time.Unix(99, 0), time.Unix(99, 0)))
	if again := capture(t, store, later, wanted); !proto.Equal(again, plain) {
		t.Errorf("a time that was not requested changed the result: got %v, want %v", plain, again)
	}
}

func TestNodePropertiesAreSorted(t *testing.T) {
	if names := tree.NodeProperties(); !slices.IsSorted(names) || len(names) != 2 {
		t.Errorf("got %q", names)
	}
}
