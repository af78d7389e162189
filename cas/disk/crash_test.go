// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// crashVar holds the directory of the store for TestCrashChild.
const crashVar = "CLOISTER_DISK_TEST_CRASH"

// Both processes run in a synctest bubble, where time starts again, so that leases matter.
const crashLease = time.Hour

func crashConfig(dir string, sync bool) disk.Config {
	return disk.Config{Dir: dir, MaxBytes: 1 << 20, Pack: 8 << 10, Lease: crashLease, Sync: sync}
}

// TestCrashChild is the child process: it exercises all methods, and prints a line for each acknowledged operation and
// before it damages a blob.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashVar)
	if dir == "" {
		t.Skip("child of another test")
	}
	dir, sync := strings.CutSuffix(dir, "?sync")
	synctest.Test(t, func(t *testing.T) { (&workload{T: t, config: crashConfig(dir, sync)}).run() })
}

type workload struct {
	*testing.T
	config disk.Config
	cache  *disk.Cache
	store  *disk.Store
	blobs  []crashBlob
	exit   int32 // of the last recorded result
}

type crashBlob struct {
	seed byte
	size int
}

func (b crashBlob) content() ([]byte, cas.Digest) { return castest.Blob(b.seed, b.size) }

func (w *workload) say(format string, args ...any) {
	if _, err := fmt.Printf("%d "+format+"\n", append([]any{time.Now().Unix()}, args...)...); err != nil {
		w.Fatal(err)
	}
}

// check ends the child if err is anything but ErrFull.
func (w *workload) check(err error) bool {
	w.Helper()
	if err != nil && !errors.Is(err, cas.ErrFull) {
		w.Fatal(err)
	}
	return err == nil
}

func (w *workload) open() {
	w.cache = open(w, w.config)
	w.store = store(w, w.cache, "")
}

func (w *workload) put(b crashBlob) {
	data, d := b.content()
	if w.check(w.store.Put(w.Context(), d, bytes.NewReader(data))) {
		w.say("has %d %d", b.seed, b.size)
		w.blobs = append(w.blobs, b)
	}
}

func (w *workload) putAll(all []crashBlob) {
	var blobs []cas.Blob
	for _, b := range all {
		data, d := b.content()
		blobs = append(blobs, cas.Blob{Digest: d, Data: data})
	}
	for i, err := range w.store.PutAll(w.Context(), blobs) {
		if w.check(err) {
			w.say("has %d %d", all[i].seed, all[i].size)
			w.blobs = append(w.blobs, all[i])
		}
	}
}

func (w *workload) record(action byte) {
	w.exit++
	_, d := castest.Blob(action, 10)
	w.say("try %d %d", action, w.exit)
	if w.check(w.store.Record(w.Context(), d, &repb.ActionResult{ExitCode: w.exit})) {
		w.say("result %d %d", action, w.exit)
	}
}

// use calls Missing, and prints the blobs that are present.
func (w *workload) use(blobs []crashBlob) {
	for _, b := range blobs {
		_, d := b.content()
		if has(w, w.store, d) {
			w.say("has %d %d", b.seed, b.size)
		}
	}
}

// damage flips a bit of each of blobs that is present, and lets Verify find it.
func (w *workload) damage(blobs []crashBlob) {
	for _, b := range blobs {
		data, d := b.content()
		if !has(w, w.store, d) {
			continue
		}
		w.say("broken %d %d", b.seed, b.size)
		// A dead copy may come first in another segment: damage all.
		if path := filePath(w.config.Dir, d); exists(path) {
			damageBlob(w, w.config.Dir, data)
			continue
		}
		for _, path := range segmentFiles(w, w.config.Dir, ".data") {
			all := must.Get(os.ReadFile(path))(w)
			if bytes.Contains(all, data) {
				damageBlob(w, w.config.Dir, data)
			}
		}
	}
	if _, err := w.cache.Verify(w.Context(), disk.VerifyOptions{Restart: true}); err != nil {
		w.Fatal(err)
	}
	for _, b := range blobs {
		if _, d := b.content(); has(w, w.store, d) {
			w.Fatalf("damaged blob %v is present", b)
		}
		w.put(b)
	}
}

// sleep lets time pass, and prints it.
func (w *workload) sleep(d time.Duration) {
	time.Sleep(d)
	w.say("now 0 0")
}

func (w *workload) run() {
	random := rand.New(rand.NewPCG(1, 2))
	w.open()
	for round := range byte(3) {
		small := func() crashBlob { return crashBlob{byte(random.IntN(256)), 600 + random.IntN(2000)} }
		large := func() crashBlob { return crashBlob{byte(random.IntN(256)), 10_000 + random.IntN(20_000)} }
		for i := range byte(8) {
			w.put(small())
			w.put(large())
			w.putAll([]crashBlob{small(), small(), small(), large()})
			w.record(i)
		}
		recent := slices.Clone(w.blobs[len(w.blobs)-20:])
		for i, b := range recent[:6] {
			_, d := b.content()
			if _, release, err := w.store.File(w.Context(), d, i%2 == 0); w.check(err) {
				release()
				w.say("has %d %d", b.seed, b.size)
			}
		}
		w.damage(recent[:4])
		for range 10 { // until notes outnumber puts
			w.sleep(crashLease / 5)
			w.use(recent)
		}
		w.cache.Maintain()
		w.sleep(crashLease / 2)
		w.use(recent[10:])
		w.record(round) // the others expire
		w.sleep(crashLease * 3 / 4)
		if _, err := w.cache.Collect(w.Context(), disk.CollectOptions{OlderThan: time.Second}); err != nil {
			w.Fatal(err)
		}
		if _, err := w.cache.Verify(&endsAfter{Context: w.Context(), calls: 5}, disk.VerifyOptions{}); err == nil {
			w.Fatal("Verify did not stop")
		}
		for range 40 { // more than fit
			w.put(large())
			w.put(small())
			w.sleep(crashLease / 10)
		}
		closeStore(w, w.cache)
		w.open()
	}
}

// points returns the names of all commit points in the source of the package.
func points(t *testing.T) []string {
	t.Helper()
	call := regexp.MustCompile(`commit\.Point\(([^)]*)\)`)
	var names []string
	err := filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range call.FindAllStringSubmatch(string(b), -1) {
			name, err := unquote(m[1])
			if err != nil {
				t.Fatalf("%s: %s: %v", path, m[0], err)
			}
			names = append(names, name...)
		}
		return err
	})
	must.Succeed(t, err)
	slices.Sort(names)
	return slices.Compact(names)
}

// unquote returns the names that an argument of commit.Point can be.
func unquote(argument string) ([]string, error) {
	if name, ok := strings.CutSuffix(argument, `" + suffix`); ok {
		return []string{strings.Trim(name, `"`) + ".log", strings.Trim(name, `"`) + ".data"}, nil
	}
	name := strings.Trim(argument, `"`)
	if len(name) != len(argument)-2 || strings.Contains(name, `"`) {
		return nil, errors.New("this test does not understand which names that is")
	}
	return []string{name}, nil
}

// TestCrashAtEveryCommitPoint: a process killed at any commit point leaves everything that it acknowledged.
func TestCrashAtEveryCommitPoint(t *testing.T) {
	program, err := exec.LookPath("go")
	if err != nil {
		sandboxtest.Unavailable(t, "tools", err)
	}
	binary := filepath.Join(t.TempDir(), "disk.test")
	if out, err := exec.Command(program, "test", "-c", "-ldflags=-s -w", "-tags", "commitpoints", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	names := points(t)
	must.Be(t, len(names) >= 15, "found only the points %q", names)
	rounds := 0
	for i, name := range names {
		// Two points need Sync, and one needs its absence. The workload is the same each time.
		reached, exhausted := false, map[bool]bool{}
		for j, n := range []int{1, 3, 25} {
			for _, sync := range []bool{false, true} {
				if exhausted[sync] || sync != ((i+j)%3 == 0) && reached {
					continue
				}
				if exhausted[sync] = !crashAt(t, binary, name, n, sync); !exhausted[sync] {
					reached = true
					rounds++
				}
			}
		}
		expect.That(t, reached, "no process reached %q", name)
	}
	t.Logf("%d points, %d processes died", len(names), rounds)
}

// A crashModel is the expected state, according to the output of the child.
type crashModel struct {
	now     int64
	blobs   map[crashBlob]int64     // time of the last use
	results map[byte]int32          // the last one acknowledged
	tried   map[byte]map[int32]bool // those that may be recorded
	broken  map[string]bool         // digests of damaged blobs
	used    map[byte]int64          // time when a result was recorded
}

func (m *crashModel) learn(line string) {
	var at int64
	var what string
	var a, n int
	if _, err := fmt.Sscanf(line, "%d %s %d %d", &at, &what, &a, &n); err != nil {
		return // output of the test binary itself
	}
	m.now = at
	switch what {
	case "has":
		m.blobs[crashBlob{byte(a), n}] = at
	case "broken":
		b := crashBlob{byte(a), n}
		_, d := b.content()
		delete(m.blobs, b)
		m.broken[d.String()] = true
	case "try":
		if m.tried[byte(a)] == nil {
			m.tried[byte(a)] = map[int32]bool{}
		}
		m.tried[byte(a)][int32(n)] = true
	case "result":
		m.results[byte(a)], m.used[byte(a)] = int32(n), at
		m.tried[byte(a)] = map[int32]bool{int32(n): true}
	}
}

// crashAt kills a child at the nth pass of a point, if it gets there, and checks the store.
func crashAt(t *testing.T, binary, point string, n int, sync bool) (died bool) {
	t.Helper()
	what := fmt.Sprintf("%s, passing %d, sync %v", point, n, sync)
	config := crashConfig(t.TempDir(), sync)
	cmd := exec.CommandContext(t.Context(), binary, "-test.run=^TestCrashChild$", "-test.timeout=15m")
	env := crashVar + "=" + config.Dir
	if sync {
		env += "?sync"
	}
	cmd.Env = append(os.Environ(), env, fmt.Sprintf("CLOISTER_TEST_DIE_AT=%s=%d", point, n))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	must.Succeed(t, err)
	m := crashModel{broken: map[string]bool{}, blobs: map[crashBlob]int64{}, results: map[byte]int32{}, tried: map[byte]map[int32]bool{}, used: map[byte]int64{}}
	var output []string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		m.learn(lines.Text())
		output = append(output, lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		if !strings.Contains(stderr.String(), "killed at "+point) {
			t.Fatalf("%s: the child failed: %v\n%s\n%s", what, err, strings.Join(output[max(0, len(output)-20):], "\n"), stderr.String())
		}
		died = true
	}
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Unix(m.now, 0)))
		for range 2 { // the second Open must succeed after the first
			c, err := disk.Open(config)
			must.Be(t, err == nil, "%s: %v", what, err)
			if s := c.Stats(); s.LogDamage+s.LogLost+s.LostSegments > 0 {
				t.Errorf("%s: a killed process is reported as damage: %+v", what, s)
			}
			m.compare(t, what, store(t, c, ""))
			// Blobs damaged by the child and not yet found.
			r, err := c.Verify(t.Context(), disk.VerifyOptions{Restart: true})
			expect.Error(t, err, nil, "%s", what)
			for _, d := range r.Damaged {
				expect.That(t, m.broken[d.Digest.String()], "%s: %s is damaged", what, d.Digest)
			}
			expect.Error(t, errors.Join(c.Check(t.Context()), c.Close()), nil, "%s", what)
		}
		leftovers(t, what, config.Dir)
	})
	return died
}

// compare reads everything that must be present.
func (m *crashModel) compare(t *testing.T, what string, s *disk.Store) {
	t.Helper()
	for b, used := range m.blobs {
		if used+int64(crashLease/time.Second) < m.now {
			continue
		}
		want, d := b.content()
		if got, err := cas.ReadAll(t.Context(), s, d, d.Size()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: blob %v was acknowledged at %d; now, at %d: got %d bytes, %v", what, b, used, m.now, len(got), err)
		}
	}
	for a, exit := range m.results {
		_, d := castest.Blob(a, 10)
		r, err := s.Lookup(t.Context(), d)
		if m.used[a]+int64(crashLease/time.Second) < m.now && errors.Is(err, cas.ErrNotFound) {
			continue
		}
		if err != nil || !m.tried[a][r.ExitCode] {
			t.Errorf("%s: result %d was %d at %d; now, at %d: got %v, %v", what, a, exit, m.used[a], m.now, r, err)
		}
	}
}

// leftovers finds files that do not belong to a store. Check covers files and tmp.
func leftovers(t *testing.T, what, dir string) {
	t.Helper()
	known := regexp.MustCompile(`^(version|lock|boot|instances|verify|checkpoint|segments|files|copies|quarantine|tmp)$`)
	top := must.Get(os.ReadDir(dir))(t)
	for _, e := range top {
		expect.That(t, known.MatchString(e.Name()), "%s: %s is left over", what, e.Name())
	}
	pairs := map[string]int{}
	for _, name := range list(t, filepath.Join(dir, "segments"))[1:] {
		digits, suffix, _ := strings.Cut(name, ".")
		pairs[digits]++
		expect.That(t, suffix == "data" || suffix == "log", "%s: segments/%s is left over", what, name)
	}
	for digits, n := range pairs {
		expect.That(t, n == 2, "%s: segment %s has %d files", what, digits, n)
	}
}
