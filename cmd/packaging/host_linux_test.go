// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// made is one set of packages for all tests.
var made struct {
	dir  string
	once sync.Once
	b    *build
	err  error
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cloister-packaging-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	made.dir = dir
	code := m.Run()
	os.RemoveAll(dir) // nothing is mounted below: what mounts does so in a namespace of its own, and elsewhere
	os.Exit(code)
}

// packages builds the packages of this checkout.
func packages(t *testing.T) *build {
	t.Helper()
	made.once.Do(func() { made.b, made.err = makeIn(filepath.Join(made.dir, "dist")) })
	if made.err != nil {
		t.Fatal(made.err)
	}
	return made.b
}

func makeIn(dir string) (*build, error) {
	b := &build{root: filepath.Join("..", ".."), out: dir, archs: []string{runtime.GOARCH}}
	return b, b.all(context.Background())
}

// one returns the package with a suffix.
func one(t *testing.T, suffix string) string {
	t.Helper()
	b := packages(t)
	for _, name := range b.made {
		if strings.HasSuffix(name, suffix) {
			return name
		}
	}
	t.Fatalf("no %s among %v", suffix, b.made)
	return ""
}

// TestSameCommitGivesSameBytes, also in another directory and at another time.
func TestSameCommitGivesSameBytes(t *testing.T) {
	first := packages(t)
	second := must.Get(makeIn(filepath.Join(t.TempDir(), "elsewhere")))(t)
	if len(first.made) != 4 || len(second.made) != len(first.made) {
		t.Fatalf("made %v and %v, want 4 each", first.made, second.made)
	}
	for i, name := range first.made {
		a := must.Get(os.ReadFile(name))(t)
		b := must.Get(os.ReadFile(second.made[i]))(t)
		if !bytes.Equal(a, b) {
			t.Errorf("%s: %x, and made again %x", filepath.Base(name), sha256.Sum256(a), sha256.Sum256(b))
		}
	}
}

// run runs a command and returns its output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// tools skips the test if a program is missing.
func tools(t *testing.T, names ...string) {
	t.Helper()
	for _, n := range names {
		if _, err := exec.LookPath(n); err != nil {
			sandboxtest.Unavailable(t, "packaging", err)
		}
	}
}

// root skips the test unless it runs as root.
func root(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		sandboxtest.Unavailable(t, "packaging", "only root can enter another root directory")
	}
}

// TestUnitsPassSystemdAnalyze without a warning.
func TestUnitsPassSystemdAnalyze(t *testing.T) {
	tools(t, "systemd-analyze")
	packages(t)
	verify := func(t *testing.T, change func(string) string) string {
		t.Helper()
		dir := t.TempDir()
		units := filepath.Join(dir, "usr/lib/systemd/system")
		for _, d := range []string{units, filepath.Join(dir, "usr/bin"), filepath.Join(dir, "etc")} {
			must.Succeed(t, os.MkdirAll(d, 0o755))
		}
		// The units' dependencies are the host's.
		targets, err := filepath.Glob("/lib/systemd/system/*.target")
		if err != nil || len(targets) == 0 {
			sandboxtest.Unavailable(t, "packaging", "the units of systemd")
		}
		for _, name := range targets {
			body, err := os.ReadFile(name)
			if errors.Is(err, fs.ErrNotExist) {
				continue // a link to what is not installed
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(units, filepath.Base(name)), body, 0o644)
			}
			must.Succeed(t, err)
		}
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "usr/bin/cloister"), []byte("#!/bin/sh\n"), 0o755))
		args := []string{"verify", "--man=no", "--root=" + dir}
		for _, name := range []string{"cloister.service", "cloister-join.service"} {
			body := must.Get(os.ReadFile(filepath.Join("systemd", name)))(t)
			must.Succeed(t, os.WriteFile(filepath.Join(units, name), []byte(change(string(body))), 0o644))
			args = append(args, name)
		}
		out, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput()
		if err != nil {
			return fmt.Sprintf("%v: %s", err, out)
		}
		return string(out)
	}
	if out := verify(t, func(s string) string { return s }); out != "" {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	for _, c := range [][2]string{{"KillMode=", "KillMod="}, {"WatchdogSec=60", "WatchdogSec=often"}, {"/usr/bin/cloister", "/usr/bin/closter"}} {
		if out := verify(t, func(s string) string { return strings.ReplaceAll(s, c[0], c[1]) }); out == "" {
			t.Errorf("systemd-analyze verify does not see %s", c[1])
		}
	}
}

// TestUnitsWaitForTheDrain checks that systemd and Kubernetes wait longer than the drain timeout.
func TestUnitsWaitForTheDrain(t *testing.T) {
	for _, name := range []string{"cloister.service", "cloister-join.service"} {
		body := must.Get(os.ReadFile(filepath.Join("systemd", name)))(t)
		find := func(expression string) time.Duration {
			m := regexp.MustCompile(expression).FindSubmatch(body)
			if m == nil {
				t.Fatalf("%s: no %s", name, expression)
			}
			d := must.Get(time.ParseDuration(strings.TrimSuffix(string(m[1]), "in")))(t)
			return d
		}
		drain, stop := find(`--drain-timeout (\S+)`), find(`(?m)^TimeoutStopSec=(\S+)$`)
		if stop <= drain {
			t.Errorf("%s: is killed after %v and drains for %v", name, stop, drain)
		}
	}
}

// TestFlagsExist checks that the program accepts the command lines of units and chart.
func TestFlagsExist(t *testing.T) {
	packages(t)
	program := filepath.Join(made.b.out, "linux-"+runtime.GOARCH, "cloister")
	help := func(t *testing.T, command string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), program, command, "--help").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if !strings.Contains(string(out), "Usage:\n  cloister "+command+" ") {
			t.Fatalf("this version has no command %s", command)
		}
		return string(out)
	}
	taken := func(t *testing.T, what string, args []string) {
		t.Helper()
		text := help(t, args[0])
		for _, a := range args[1:] {
			name, _, _ := strings.Cut(a, "=")
			if strings.HasPrefix(name, "--") && !regexp.MustCompile(regexp.QuoteMeta(name)+`[ \n]`).MatchString(text) {
				t.Errorf("%s: cloister %s has no %s", what, args[0], name)
			}
		}
	}
	for _, name := range []string{"cloister.service", "cloister-join.service"} {
		t.Run(name, func(t *testing.T) {
			body := must.Get(os.ReadFile(filepath.Join("systemd", name)))(t)
			m := regexp.MustCompile(`(?m)^ExecStart=/usr/bin/cloister (.*)$`).FindSubmatch(body)
			if m == nil {
				t.Fatal("it does not start cloister")
			}
			args := strings.Fields(string(m[1]))
			taken(t, name, args)
			if file := "EnvironmentFile=-/etc/cloister/" + args[0] + ".env"; !strings.Contains(string(body), "\n"+file+"\n") {
				t.Errorf("it lacks %s, whose variables would be ignored silently", file)
			}
			run(t, program, "config", "show", "--config", "systemd/config.yaml", args[0])
		})
	}
	files := must.Get(filepath.Glob("testdata/values/*.yaml"))(t)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			values := must.Get(os.ReadFile(file))(t)
			objects := must.Get(render(values))(t)
			for _, o := range append(kind(objects, "Deployment"), kind(objects, "StatefulSet")...) {
				list, _ := at(o, "spec", "template", "spec", "containers", 0, "args").([]any)
				var args []string
				for _, a := range list {
					args = append(args, fmt.Sprint(a))
				}
				taken(t, fmt.Sprint(at(o, "metadata", "name")), args)
			}
		})
	}
}

// TestRpmHasWhatTheDebHas, read by rpm itself.
func TestRpmHasWhatTheDebHas(t *testing.T) {
	tools(t, "rpm", "dpkg-deb")
	rpm, deb := one(t, ".rpm"), one(t, ".deb")
	run(t, "rpm", "--checksig", "--nosignature", rpm) // its digests
	got := run(t, "rpm", "-qp", "--nosignature", "--queryformat", "%{NAME} %{VERSION} %{LICENSE} %{BUILDTIME} %{BUILDHOST}", rpm)
	if want := fmt.Sprintf("cloister %s Apache-2.0 %d localhost", made.b.version, made.b.time.Unix()); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	var inRPM, inDeb []string
	for line := range strings.Lines(run(t, "rpm", "-qp", "--nosignature", "--queryformat", "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES}\n]", rpm)) {
		inRPM = append(inRPM, strings.TrimSpace(line))
	}
	for line := range strings.Lines(run(t, "dpkg-deb", "--contents", deb)) {
		if f := strings.Fields(line); f[0][0] != 'd' {
			inDeb = append(inDeb, f[0]+" "+f[1]+" "+strings.TrimPrefix(f[5], "."))
		}
	}
	slices.Sort(inRPM)
	slices.Sort(inDeb)
	for _, name := range []string{
		"/usr/share/man/man1/cloister.1", "/usr/share/man/man1/cloister-action-ls.1", "/usr/share/bash-completion/completions/cloister",
		"/usr/share/zsh/vendor-completions/_cloister", "/usr/share/zsh/site-functions/_cloister", "/usr/share/fish/vendor_completions.d/cloister.fish",
	} {
		if !slices.Contains(inDeb, "-rw-r--r-- root/root "+name) {
			t.Errorf("the deb lacks %s", name)
		}
	}
	if !slices.Equal(inRPM, inDeb) || len(inDeb) < 7 {
		t.Errorf("the rpm has\n%s\nand the deb\n%s", strings.Join(inRPM, "\n"), strings.Join(inDeb, "\n"))
	}
	if configs := run(t, "rpm", "-qp", "--nosignature", "--configfiles", rpm); configs != "/etc/cloister/config.yaml\n/etc/cloister/join.env\n/etc/cloister/serve.env\n" {
		t.Errorf("configuration: %q", configs)
	}
}

// TestImageIsTheProgramAlone starts the program from the image.
func TestImageIsTheProgramAlone(t *testing.T) {
	root(t)
	dir := t.TempDir()
	extract(t, one(t, ".oci.tar"), dir)
	index := must.Get(layout.ImageIndexFromPath(dir))(t)
	outer := must.Get(index.IndexManifest())(t)
	if len(outer.Manifests) != 1 || outer.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != made.b.version {
		t.Fatalf("index: %+v", outer.Manifests)
	}
	inner := must.Get(index.ImageIndex(outer.Manifests[0].Digest))(t)
	manifest := must.Get(inner.IndexManifest())(t)
	if len(manifest.Manifests) != 1 || manifest.Manifests[0].Platform.Architecture != runtime.GOARCH {
		t.Fatalf("index of the image: %+v", manifest.Manifests)
	}
	img := must.Get(inner.Image(manifest.Manifests[0].Digest))(t)
	config := must.Get(img.ConfigFile())(t)
	if c := config.Config; c.User != "65532:65532" || fmt.Sprint(c.Entrypoint, c.Cmd) != "[/usr/bin/cloister] [serve --dir /var/lib/cloister]" {
		t.Errorf("config: %+v", c)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	body := must.Get(layers[0].Uncompressed())(t)
	defer body.Close()
	// The image's user must be able to enter every directory above.
	files, err := os.MkdirTemp("", "cloister-image-")
	if err == nil {
		err = os.Chmod(files, 0o755)
	}
	must.Succeed(t, err)
	defer os.RemoveAll(files)
	names := untar(t, body, files)
	if want := "etc/ etc/group etc/passwd tmp/ usr/ usr/bin/ usr/bin/cloister var/ var/lib/ var/lib/cloister/"; strings.Join(names, " ") != want {
		t.Errorf("the image has %v", names)
	}
	// Container runtimes mount /proc, too.
	must.Succeed(t, os.Mkdir(filepath.Join(files, "proc"), 0o555))
	tools(t, "unshare", "chroot")
	inside := func(args ...string) *exec.Cmd {
		script := fmt.Sprintf(`mount -t proc proc "$0/proc" && exec chroot --userspec=%d:%[1]d "$0" /usr/bin/cloister "$@"`, user)
		return exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "--propagation", "private", "/bin/sh", "-c", script, files}, args...)...)
	}
	if out, err := inside("version").CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "cloister "+made.b.version+" ") {
		t.Errorf("cloister version in the image: %v: %s", err, out)
	}
	// A head executes nothing.
	head := inside("serve", "--dir", "/var/lib/cloister", "--jobs", "0", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--max-size", "1GiB")
	said := must.Get(head.StdoutPipe())(t)
	var complaints bytes.Buffer
	head.Stderr = &complaints
	must.Succeed(t, head.Start())
	lines, ready := bufio.NewScanner(said), false
	for !ready && lines.Scan() {
		ready = strings.HasPrefix(lines.Text(), "bazel ")
	}
	if !ready {
		t.Errorf("a head in the image is not ready: %s", complaints.String())
	}
	_ = head.Process.Signal(syscall.SIGTERM) // it may have ended
	for lines.Scan() {
	}
	if err := head.Wait(); err != nil {
		t.Errorf("a head in the image: %v: %s", err, complaints.String())
	}
}

// extract extracts the tarball name into dir.
func extract(t *testing.T, name, dir string) {
	t.Helper()
	f := must.Get(os.Open(name))(t)
	defer f.Close()
	untar(t, f, dir)
}

// untar extracts one of our tars into dir and returns the names in it.
func untar(t *testing.T, r io.Reader, dir string) (names []string) {
	t.Helper()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return names
		}
		must.Succeed(t, err)
		names = append(names, h.Name)
		path := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			must.Succeed(t, errors.Join(os.MkdirAll(path, 0o755), os.Lchown(path, h.Uid, h.Gid)))
			continue
		}
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		body, err := io.ReadAll(tr)
		if err == nil {
			err = os.WriteFile(path, body, fs.FileMode(h.Mode))
		}
		must.Succeed(t, err)
	}
}

// A mirror is this machine's source of Debian packages.
type mirror struct{ uri, suite, keyring string }

// findMirror reads the mirror from apt's configuration.
func findMirror() (mirror, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return mirror{}, err
	}
	m := regexp.MustCompile(`(?m)^VERSION_CODENAME="?([a-z]+)"?$`).FindSubmatch(release)
	if m == nil {
		return mirror{}, errors.New("/etc/os-release has no VERSION_CODENAME: this is neither Debian nor Ubuntu")
	}
	suite := string(m[1])
	lists, _ := filepath.Glob("/etc/apt/sources.list.d/*")
	for _, name := range append([]string{"/etc/apt/sources.list"}, lists...) {
		body, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		// Paragraphs of the newer format, lines of the older.
		for _, paragraph := range strings.Split(string(body), "\n\n") {
			fields := map[string]string{}
			for line := range strings.Lines(paragraph) {
				if k, v, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(line, "#") {
					fields[k] = strings.TrimSpace(v)
				}
				words := strings.Fields(regexp.MustCompile(`\[[^]]*\]`).ReplaceAllString(line, ""))
				if len(words) > 3 && words[0] == "deb" && words[2] == suite && slices.Contains(words[3:], "main") {
					return mirror{words[1], suite, ""}, nil
				}
			}
			if slices.Contains(strings.Fields(fields["Suites"]), suite) && slices.Contains(strings.Fields(fields["Components"]), "main") {
				return mirror{strings.Fields(fields["URIs"])[0], suite, fields["Signed-By"]}, nil
			}
		}
	}
	return mirror{}, fmt.Errorf("the configuration of apt has no source of %s main", suite)
}

// cleanRoot returns a directory with a minimal Debian and systemd, made once and kept unchanged in the user's cache
// directory.
func cleanRoot(t *testing.T) string {
	t.Helper()
	root(t)
	tools(t, "debootstrap", "unshare", "pivot_root")
	m, err := findMirror()
	if err != nil {
		sandboxtest.Unavailable(t, "packaging", err)
	}
	cache := must.Get(os.UserCacheDir())(t)
	dir := filepath.Join(cache, "cloister-packaging", m.suite+"-"+runtime.GOARCH+"-1")
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	must.Succeed(t, os.MkdirAll(filepath.Dir(dir), 0o755))
	tmp := must.Get(os.MkdirTemp(filepath.Dir(dir), "tmp-"))(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	args := []string{"--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "debootstrap", "--variant=minbase", "--include=systemd"}
	if m.keyring != "" {
		args = append(args, "--keyring="+m.keyring)
	}
	out, err := exec.CommandContext(ctx, "unshare", append(args, m.suite, tmp, m.uri)...).CombinedOutput()
	if err == nil {
		err = os.Chmod(tmp, 0o755)
	}
	if err == nil {
		if err = os.Rename(tmp, dir); errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTEMPTY) {
			os.RemoveAll(tmp) // somebody else was faster
			return dir
		}
	}
	if err != nil {
		os.RemoveAll(tmp) // debootstrap's mounts ended with its namespace
		sandboxtest.Unavailable(t, "packaging", fmt.Errorf("debootstrap: %w\n%s", err, tail(out)))
	}
	return dir
}

// tail returns the last lines of a program's output.
func tail(b []byte) []byte {
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-20):], []byte("\n"))
}

// cgroupOf returns the cgroup2 mount and our group below it.
func cgroupOf(t *testing.T) (group string) {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		sandboxtest.Unavailable(t, "packaging", err)
	}
	mounts := must.Get(os.Open("/proc/self/mounts"))(t)
	defer mounts.Close()
	m := regexp.MustCompile(`(?m)^0::(.*)$`).FindSubmatch(own)
	for s := bufio.NewScanner(mounts); m != nil && s.Scan(); {
		if f := strings.Fields(s.Text()); f[2] == "cgroup2" {
			return filepath.Join(f[1], string(m[1]))
		}
	}
	sandboxtest.Unavailable(t, "packaging", "control groups of version 2, without which there is no systemd")
	return ""
}

// TestDebInACleanSystem installs the deb in a minimal Debian booted by systemd in its own namespaces and runs
// testdata/inside.sh there.
func TestDebInACleanSystem(t *testing.T) {
	lower := cleanRoot(t)
	deb := one(t, ".deb")
	group := filepath.Join(cgroupOf(t), fmt.Sprintf("cloister-packaging.%d", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		sandboxtest.Unavailable(t, "packaging", err)
	}
	t.Cleanup(func() {
		// Groups made by systemd, whose processes ended with their namespace.
		var dirs []string
		filepath.WalkDir(group, func(name string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, name)
			}
			return nil
		})
		for _, d := range slices.Backward(dirs) {
			if err := os.Remove(d); err != nil {
				t.Errorf("left behind: %v", err)
			}
		}
	})
	work := t.TempDir()
	said := filepath.Join(work, "said")
	for name, from := range map[string]string{"cloister.deb": deb, "inside.sh": "testdata/inside.sh"} {
		body, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(work, name), body, 0o755)
		}
		must.Succeed(t, err)
	}
	must.Succeed(t, os.WriteFile(said, nil, 0o666))
	boot := must.Get(filepath.Abs("testdata/boot.sh"))(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c",
		`echo 0 > "$1/cgroup.procs" && exec unshare --mount --propagation private --pid --fork --kill-child --cgroup --uts --ipc --net /bin/sh "$2" "$3" "$4"`,
		"sh", group, boot, lower, work)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = 10 * time.Second
	console, err := cmd.CombinedOutput()
	text, readErr := os.ReadFile(said)
	if err := errors.Join(err, readErr); err != nil || !bytes.HasSuffix(text, []byte("\nend\n")) {
		t.Fatalf("%v; the system said:\n%s\nand the script:\n%s", err, tail(console), text)
	}
	t.Logf("%s", text)
	got := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ": "); ok {
			got[k] = v
		}
	}
	// Without controllers from the host, as with version 1, nothing can be delegated.
	delegated, tier := strings.Contains(got["controllers"], "memory"), "partial, without limits of memory, CPU time"
	if delegated {
		tier = "full"
	}
	for _, want := range []struct{ key, value, why string }{
		{"installed", "install ok installed", "dpkg -i"},
		{"after install", "inactive inactive disabled disabled", "installing starts nothing"},
		{"version", "cloister " + made.b.version, "the program runs"},
		{"check", "tier  " + tier, "as the user of the service, the sandbox lacks only limits that the host cannot delegate"},
		{"run", "0", "and runs a command"},
		{"after start", "active", "the unit starts, and says that it is ready"},
		{"user", "cloister", "not as root"},
		{"status", "0 running, 0 queued", "signs of life"},
		{"tier", "(" + tier, "within the confinement of the unit, no layer of the sandbox is missing"},
		{"ready", "ready", "it answers"},
		{"state", "cloister:cloister 700 /var/lib/cloister", "the store is its own"},
		{"restarted", "yes", "a process that is stuck is ended by the watchdog, and started again"},
		{"after restart", "active, 0 more", "and lives, as its signs of life say"},
		{"configuration", "kept", "what was changed survives the same package, installed again"},
		{"result", "success 0", "SIGTERM ends it in order"},
		{"mistake", "failed", "a mistake in the flags is not tried for ever"},
		{"former flags", "failed CLOISTER_FLAGS has no effect", "flags of an earlier package are not dropped silently"},
		{"removed", "0", "dpkg --purge"},
	} {
		if !strings.Contains(got[want.key], want.value) {
			t.Errorf("%s: got %q, want %q: %s", want.key, got[want.key], want.value, want.why)
		}
	}
	if got["after removal"] != "/var/lib/cloister" {
		t.Errorf("after removal there is %q, want nothing but the state directory", got["after removal"])
	}
	if delegated {
		if !strings.HasSuffix(got["group"], "/cloister-worker") || !strings.Contains(got["limits"], "ok") {
			t.Errorf("control groups: the worker is in %q, limits are %q", got["group"], got["limits"])
		}
	}
	if !strings.HasPrefix(got["group"], "/system.slice/cloister.service") || !strings.HasPrefix(got["delegated"], "cloister ") {
		t.Errorf("control groups: the worker is in %q, which belongs to %q", got["group"], got["delegated"])
	}
}
