// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// runScript runs a shell script in a new directory, with additional variables, and returns the file "out". It skips the
// test if a tool is missing or the script exits with 77.
func runScript(t *testing.T, script string, tools []string, env ...string) string {
	t.Helper()
	if runtime.GOOS != "linux" {
		sandboxtest.Unavailable(t, "tools", "the scripts need Linux tools")
	}
	for _, tool := range append(tools, "sh") {
		if _, err := exec.LookPath(tool); err != nil {
			sandboxtest.Unavailable(t, "tools", err)
		}
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script)
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LC_ALL=C", "TZ=UTC"}, env...)
	text, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() == 77 {
		sandboxtest.Unavailable(t, "tools", string(text))
	}
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, text)
	}
	data, err := os.ReadFile(filepath.Join(dir, "out"))
	must.Succeed(t, err)
	return string(data)
}

// summaries formats differences as "where/where: what: cause".
func summaries(ds []Difference) []string {
	var all []string
	for _, d := range ds {
		all = append(all, strings.Join(d.Where, "/")+": "+d.What+": "+string(d.Cause))
	}
	return all
}

const files = "umask 022; mkdir d; for f in a b c; do echo content of $f > d/$f.txt; done; touch -d @1000000000 d d/*; cd d; "

func TestArchivesNameMemberAndCause(t *testing.T) {
	for _, row := range []struct {
		name, a, b string
		tools      []string
		want       []string
	}{
		{"ar, mtime", "ar crU ../out *", "touch -d @1100000000 b.txt; ar crU ../out *", []string{"ar"}, []string{"out/b.txt: mtime: timestamp"}},
		{"ar, order", "ar crD ../out *", "ar crD ../out c.txt b.txt a.txt", []string{"ar"}, []string{"out: order of members: member order"}},
		{"ar, mode", "ar crU ../out *", "chmod 600 b.txt; ar crU ../out *", []string{"ar"}, []string{"out/b.txt: mode: file mode"}},
		{
			"ar, member and content", "ar crD ../out *", "echo pid 12 >> b.txt; rm c.txt; ar crD ../out *",
			[]string{"ar"},
			[]string{"out/b.txt: line 2 of the second only: ", "out/c.txt: member: "},
		},
		{
			"ar, long names", "mv a.txt a-rather-long-name-of-a-file.txt; ar crU ../out *", "mv a.txt a-rather-long-name-of-a-file.txt; touch *; ar crU ../out a-*",
			[]string{"ar"},
			[]string{"out/a-rather-long-name-of-a-file.txt: mtime: timestamp", "out/b.txt: member: ", "out/c.txt: member: "},
		},
		{"tar, mtime", "tar cf ../out *", "touch -d @1100000000 b.txt; tar cf ../out *", []string{"tar"}, []string{"out/b.txt: mtime: timestamp"}},
		{
			"tar, owner", "tar cf ../out --owner=me:1 --group=us:2 a.txt", "tar cf ../out --owner=you:3 --group=them:4 a.txt",
			[]string{"tar"},
			[]string{"out/a.txt: uid: owner", "out/a.txt: gid: owner", "out/a.txt: user: owner", "out/a.txt: group: owner"},
		},
		{"tar, mode", "tar cf ../out *", "chmod 600 b.txt; tar cf ../out *", []string{"tar"}, []string{"out/b.txt: mode: file mode"}},
		{"tar, order", "tar cf ../out a.txt b.txt", "tar cf ../out b.txt a.txt", []string{"tar"}, []string{"out: order of members: member order"}},
		{
			"tar, pax", "tar cf ../out --format=posix a.txt", "touch -a -d @7 *; tar cf ../out --format=posix a.txt",
			[]string{"tar"},
			[]string{"out/a.txt: atime: timestamp", "out/a.txt: ctime: timestamp"},
		},
		{
			"tar, name with a number of a process", "mv a.txt x.pid-12.txt; tar cf ../out x*", "mv a.txt x.pid-19.txt; tar cf ../out x*",
			[]string{"tar"},
			[]string{"out/x.pid-12.txt: name: process id"},
		},
		{"tar, link", "ln -s a.txt l; tar cf ../out l --mtime=@0", "ln -s b.txt l; tar cf ../out l --mtime=@0", []string{"tar"}, []string{"out/l: link: "}},
		{
			"zip, mtime", "zip -qX ../o *; mv ../o.zip ../out", "touch -d @1100000000 b.txt; zip -qX ../o *; mv ../o.zip ../out",
			[]string{"zip"},
			[]string{"out/b.txt: modified: timestamp"},
		},
		{
			"zip, all fields", "zip -q ../o a.txt; mv ../o.zip ../out", "touch -d @1100000000 a.txt; zip -q ../o a.txt; mv ../o.zip ../out",
			[]string{"zip"},
			[]string{"out/a.txt: modified: timestamp", "out/a.txt: extra field 0x5455: timestamp", "out/a.txt: local extra field 0x5455: timestamp"},
		},
		{
			"zip, order", "zip -qX ../o a.txt b.txt; mv ../o.zip ../out", "zip -qX ../o b.txt a.txt; mv ../o.zip ../out",
			[]string{"zip"},
			[]string{"out: order of members: member order"},
		},
		{
			"zip, content", "zip -qX ../o *; mv ../o.zip ../out", "date +%s >> a.txt; touch -d @1000000000 *; zip -qX ../o *; mv ../o.zip ../out",
			[]string{"zip"},
			[]string{"out/a.txt: line 2 of the second only: "},
		},
		{
			"zip, level", "seq 500 > s; touch -d @7 s; zip -qX1 ../o s; mv ../o.zip ../out", "seq 500 > s; touch -d @7 s; zip -qX9 ../o s; mv ../o.zip ../out",
			[]string{"zip"},
			[]string{"out/s: flags: "},
		},
		{
			"gzip, mtime", "gzip a.txt; mv a.txt.gz ../out", "touch b.txt; mv b.txt a.txt; gzip a.txt; mv a.txt.gz ../out",
			[]string{"gzip"},
			[]string{"out: mtime: timestamp", "out/contents: line 1: "},
		},
		{
			"gzip, header alone", "gzip a.txt; mv a.txt.gz ../out", "touch a.txt; gzip a.txt; mv a.txt.gz ../out",
			[]string{"gzip"},
			[]string{"out: mtime: timestamp"},
		},
		{"gzip, name", "gzip -c a.txt > ../out", "mv a.txt other.txt; gzip -c other.txt > ../out", []string{"gzip"}, []string{"out: name: "}},
		{
			"gzip, level", "seq 500 | gzip -n1 > ../out", "seq 500 | gzip -n6 > ../out",
			[]string{"gzip"},
			[]string{"out: level: ", "out: compression, of the same contents: "},
		},
		{
			"zstd", "(seq 500; echo pid 12) | zstd -q > ../out", "(seq 500; echo pid 15) | zstd -q > ../out",
			[]string{"zstd"},
			[]string{"out/contents: line 501: process id"},
		},
		{
			"bzip2", "(seq 500; echo pid 12) | bzip2 > ../out", "(seq 500; echo pid 15) | bzip2 > ../out",
			[]string{"bzip2"},
			[]string{"out/contents: line 501: process id"},
		},
		{
			"ar in tar in gzip", "ar crU x.a *; touch -d @7 x.a; tar c x.a | gzip -n > ../out", "touch a.txt; ar crU x.a *; touch -d @7 x.a; tar c x.a | gzip -n > ../out",
			[]string{"ar", "tar", "gzip"},
			[]string{"out/contents/x.a/a.txt: mtime: timestamp"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			a, b := runScript(t, files+row.a, row.tools), runScript(t, files+row.b, row.tools)
			if got := summaries(blobs(t, "out", a, b, Known{})); !slices.Equal(got, row.want) {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

func TestSymbolTableIsReportedAfterMembers(t *testing.T) {
	a := arred("", "x.o")
	b := strings.NewReplacer("x.o is its", "y.o is its", " is its content\n", " is its CONTENT\n").Replace(a)
	want := []string{"lib.a/x.o: line 1: ", "lib.a/(symbol table): line 1: "}
	if got := summaries(blobs(t, "lib.a", a, b, Known{})); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestJarNamesMemberAndFix(t *testing.T) {
	a := runScript(t, files+"jar cf ../out a.txt", []string{"jar"})
	b := runScript(t, files+"touch -d @1100000000 a.txt; jar cf ../out a.txt", []string{"jar"})
	ds := blobs(t, "x.jar", a, b, Known{})
	got := summaries(ds)
	if want := "x.jar/a.txt: modified: timestamp"; !slices.Contains(got, want) || !strings.HasPrefix(ds[0].Fix, "jar --date") {
		t.Errorf("got %q with the fix %q, want %q", got, ds[0].Fix, want)
	}
}

func TestZipTimesOfAnotherZoneNameTheZone(t *testing.T) {
	script := files + "zip -qX ../o *; mv ../o.zip ../out"
	a, b := runScript(t, script, []string{"zip"}), runScript(t, script, []string{"zip"}, "TZ=UTC-14")
	k := knownRuns()
	k.B.Start, k.B.End = k.A.Start, k.A.End
	want := []string{"x/a.txt: modified: time zone", "x/b.txt: modified: time zone", "x/c.txt: modified: time zone"}
	if got := summaries(blobs(t, "x", a, b, k)); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// cpioOf returns a newc archive whose members contain their names.
func cpioOf(mtime, uid, mode int, names ...string) string {
	var b strings.Builder
	pad := func() {
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
	}
	for i, name := range append(names, "TRAILER!!!") {
		fmt.Fprintf(&b, "070701%08x%08x%08x%08x%08x%08x%08x%032x%08x%08x%s\x00", i, mode, uid, uid, 1, mtime, len(name), 0, len(name)+1, 0, name)
		pad()
		b.WriteString(name)
		pad()
	}
	return b.String()
}

func TestCpioNamesMemberAndCause(t *testing.T) {
	odc := func(mtime int, content string) string {
		return fmt.Sprintf("070707%06o%06o%06o%06o%06o%06o%06o%011o%06o%011oa\x00%s", 1, 2, 0o100644, 0, 0, 1, 0, mtime, 2, len(content), content) +
			fmt.Sprintf("070707%053o%06o%011oTRAILER!!!\x00", 0, 11, 0)
	}
	base := cpioOf(1_000_000_000, 1000, 0o100644, "a", "bb")
	for _, row := range []struct {
		name, a, b string
		want       []string
	}{
		{"mtime", base, cpioOf(1_000_000_001, 1000, 0o100644, "a", "bb"), []string{"x/a: mtime: timestamp", "x/bb: mtime: timestamp"}},
		{
			"owner", base, cpioOf(1_000_000_000, 0, 0o100644, "a", "bb"),
			[]string{"x/a: uid: owner", "x/a: gid: owner", "x/bb: uid: owner", "x/bb: gid: owner"},
		},
		{"mode", base, cpioOf(1_000_000_000, 1000, 0o100600, "a", "bb"), []string{"x/a: mode: file mode", "x/bb: mode: file mode"}},
		{
			"order", base, cpioOf(1_000_000_000, 1000, 0o100644, "bb", "a"),
			[]string{"x: order of members: member order", "x/a: inode: ", "x/bb: inode: "},
		},
		{"additional member", base, cpioOf(1_000_000_000, 1000, 0o100644, "a", "bb", "c"), []string{"x/c: member: "}},
		{"data after the trailer", base + "one", base + "two", []string{"x/(behind the end): line 1: "}},
		{"POSIX", odc(1, "at 12:00:00"), odc(2, "at 12:00:01"), []string{"x/a: mtime: timestamp", "x/a: line 1: timestamp"}},
		{"cut off", base[:len(base)-100], base[:150] + "?" + base[151:len(base)-100], []string{"x: content: "}},
	} {
		t.Run(row.name, func(t *testing.T) {
			ds := blobs(t, "x", row.a, row.b, Known{})
			checkDifferences(t, ds)
			if got := summaries(ds); !slices.Equal(got, row.want) {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
	for _, hostile := range []string{"ffffffff", "7fffffff", "80000000"} { // sizes of names and contents
		damaged := base[:54] + hostile + base[62:94] + hostile + base[102:]
		if ds := blobs(t, "x", damaged, damaged+"x", Known{}); len(ds) != 1 {
			t.Errorf("%s: got %q", hostile, summaries(ds))
		}
	}
}

func TestGcovNamesTheStampAndThePath(t *testing.T) {
	const notes = "oncg*22B"
	ds := blobs(t, "x.gcno", notes+"\x01\x02\x03\x04\x00\x00\x00\x00/one/build\x00\x00", notes+"\x05\x02\x03\x04\x00\x00\x00\x00/another/build\x00", Known{})
	if got, want := summaries(ds), []string{"x.gcno: stamp: timestamp", "x.gcno/records: text: path"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if ds[0].Fix != FixFor(Timestamp, "gcov") || ds[1].Fix != FixFor(Path, "gcov") {
		t.Errorf("the fixes are %q and %q", ds[0].Fix, ds[1].Fix)
	}
	if ds := blobs(t, "x.gcno", notes+"\x01", notes+"\x02", Known{}); len(ds) != 1 {
		t.Errorf("cut off: got %q", summaries(ds))
	}
}
