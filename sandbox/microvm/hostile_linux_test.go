// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// pair returns both ends of a serial port.
func pair(t *testing.T) (host, guest *port) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must.Succeed(t, err)
	host, guest = newPort(os.NewFile(uintptr(fds[0]), "host")), newPort(os.NewFile(uintptr(fds[1]), "guest"))
	t.Cleanup(func() { host.file.Close(); guest.file.Close() })
	return host, guest
}

func openDir(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must.Succeed(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// listing describes what is below a directory.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var text strings.Builder
	must.Succeed(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, p)
		text.WriteString(name + " " + info.Mode().String() + " " + info.ModTime().UTC().Format("2006-01-02T15:04:05.000000000"))
		switch {
		case info.Mode().IsRegular():
			text.WriteString(" " + string(must.Get(os.ReadFile(p))(t)))
		case info.Mode()&fs.ModeSymlink != 0:
			text.WriteString(" " + must.Get(os.Readlink(p))(t))
		}
		text.WriteString("\n")
		return nil
	}))
	return text.String()
}

// TestTreesArriveAsTheyAre: names, types, modes, times, contents, holes and hard links of a tree survive.
func TestTreesArriveAsTheyAre(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(from, name) }
	must.Succeed(t, errors.Join(
		os.MkdirAll(at("out/a/b"), 0o755), os.Mkdir(at("other"), 0o755), os.WriteFile(at("other/x"), nil, 0o644),
		os.WriteFile(at("out/a/file"), []byte(strings.Repeat("text", 50_000)), 0o640), os.Link(at("out/a/file"), at("out/a/same")),
		os.WriteFile(at("out/empty"), nil, 0o600), os.Symlink("../nowhere", at("out/a/link")), unix.Mkfifo(at("out/pipe"), 0o600),
		os.WriteFile(at("out/holes"), []byte("x"), 0o755), os.Truncate(at("out/holes"), 8<<20), os.Chmod(at("out/a/b"), 0o500|fs.ModeSticky),
	))
	must.Succeed(t, os.Mkdir(filepath.Join(to, "out"), 0o755))
	host, guest := pair(t)
	sent := make(chan error, 1)
	go func() { sent <- sendTree(guest, openDir(t, from), []string{"out", "out/a", "out"}) }()
	treeErr, err := receiveTree(host, openDir(t, to), []string{"out"}, receipt{1 << 20, 100})
	must.Succeed(t, errors.Join(treeErr, err, <-sent))
	if got, want := listing(t, filepath.Join(to, "out")), listing(t, at("out")); got != want {
		t.Errorf("got\n%.2000s\nwant\n%.2000s", got, want)
	}
	if left := must.Get(os.ReadDir(to))(t); len(left) != 1 {
		t.Errorf("got %v, want only out", left)
	}
	var a, b unix.Stat_t
	must.Succeed(t, errors.Join(unix.Stat(filepath.Join(to, "out/a/file"), &a), unix.Stat(filepath.Join(to, "out/a/same"), &b)))
	if a.Ino != b.Ino {
		t.Error("the hard link is another file")
	}
	must.Succeed(t, unix.Stat(filepath.Join(to, "out/holes"), &a))
	if a.Blocks > 64 {
		t.Errorf("the file with holes has %d blocks", a.Blocks)
	}
}

// TestHostileTreesAreRefused: whatever a guest sends, nothing outside its outputs is created and nothing is
// overwritten.
func TestHostileTreesAreRefused(t *testing.T) {
	file := func(name string) entry { return entry{Path: name, Mode: unix.S_IFREG | 0o644, Size: 1} }
	link := func(name, target string) entry {
		return entry{Path: name, Mode: unix.S_IFLNK | 0o777, Target: target}
	}
	dir := func(name string) entry { return entry{Path: name, Mode: unix.S_IFDIR | 0o755} }
	data := func(at int64, text string) []byte {
		return append(binary.LittleEndian.AppendUint64([]byte{frameData}, uint64(at)), text...)
	}
	wants := map[string]string{
		"above":                      "unexpected path",
		"absolute":                   "unexpected path",
		"inside dots":                "unexpected path",
		"another directory":          "unexpected path",
		"the directory itself":       "unexpected path",
		"a similar name":             "unexpected path",
		"through a link":             "unexpected path",
		"through a deep link":        "unexpected path",
		"a directory that was left":  "unexpected path",
		"through a file":             "unexpected path",
		"a link as a file":           "file exists",
		"twice":                      "file exists",
		"what is there":              "file exists",
		"a device":                   "type 20000",
		"a hard link outside":        "no file",
		"a hard link to a link":      "no file",
		"a hard link to nothing":     "no file",
		"a hard link to a directory": "no file",
		"a hard link through a link": "too many levels of symbolic links",
		"data without a file":        "outside a file",
		"data after a link":          "outside a file",
		"data behind the end":        "outside a file",
		"data before the start":      "outside a file",
		"too much data":              "too much data",
		"a huge file":                "a file of",
		"a directory's target":       "of another",
		"a directory's size":         "of another",
		"a directory's other name":   "of another",
		"a file's target":            "of another",
		"a link's size":              "of another",
		"no JSON":                    "unexpected end of JSON",
		"an unknown frame":           "unknown frame",
		"a short frame":              "unknown frame",
	}
	for name, frames := range map[string][]any{
		"above":                      {file("../x")},
		"absolute":                   {file("/etc/x")},
		"inside dots":                {file("out/../in/x")},
		"another directory":          {file("in/x")},
		"the directory itself":       {file("out")},
		"a similar name":             {file("outer")},
		"through a link":             {link("out/l", "../in"), file("out/l/x")},
		"through a deep link":        {dir("out/d"), link("out/d/l", "/"), file("out/d/l/etc/x")},
		"a directory that was left":  {dir("out/a"), dir("out/b"), file("out/a/x")},
		"through a file":             {file("out/x"), file("out/x/y")},
		"a link as a file":           {link("out/l", "../in/input"), file("out/l")},
		"twice":                      {file("out/x"), file("out/x")},
		"what is there":              {file("out/there")},
		"a device":                   {entry{Path: "out/d", Mode: unix.S_IFCHR | 0o666}},
		"a hard link outside":        {entry{Path: "out/h", Mode: unix.S_IFREG | 0o644, Same: "in/input"}},
		"a hard link to nothing":     {entry{Path: "out/h", Mode: unix.S_IFREG | 0o644, Same: "out/x"}},
		"a hard link to a directory": {dir("out/d"), entry{Path: "out/h", Mode: unix.S_IFREG | 0o644, Same: "out/d"}},
		"a hard link through a link": {link("out/l", "../in"), entry{Path: "out/h", Mode: unix.S_IFREG | 0o644, Same: "out/l/input"}},
		"a hard link to a link":      {link("out/l", "../in/input"), entry{Path: "out/h", Mode: unix.S_IFREG | 0o644, Same: "out/l"}},
		"data without a file":        {data(0, "x")},
		"data after a link":          {file("out/x"), link("out/l", "x"), data(0, "x")},
		"data behind the end":        {file("out/x"), data(1, "x")},
		"data before the start":      {file("out/x"), data(-1, "x")},
		"too much data": {
			entry{Path: "out/x", Mode: unix.S_IFREG, Size: 50_000}, data(0, strings.Repeat("x", 50_000)), data(0, strings.Repeat("x", 50_000)),
		},
		"a huge file":              {entry{Path: "out/x", Mode: unix.S_IFREG, Size: 1 << 60}},
		"a directory's target":     {entry{Path: "out/d", Mode: unix.S_IFDIR | 0o755, Target: "x"}},
		"a directory's size":       {entry{Path: "out/d", Mode: unix.S_IFDIR | 0o755, Size: 1}},
		"a directory's other name": {entry{Path: "out/d", Mode: unix.S_IFDIR | 0o755, Same: "out/x"}},
		"a file's target":          {entry{Path: "out/f", Mode: unix.S_IFREG | 0o755, Target: "x"}},
		"a link's size":            {entry{Path: "out/l", Mode: unix.S_IFLNK | 0o777, Target: "x", Size: 1}},
		"no JSON":                  {[]byte("E{")},
		"an unknown frame":         {[]byte("X")},
		"a short frame":            {[]byte("D123")},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			root := filepath.Join(top, "root")
			must.Succeed(t, errors.Join(os.MkdirAll(filepath.Join(root, "out"), 0o755), os.Mkdir(filepath.Join(root, "in"), 0o755),
				os.WriteFile(filepath.Join(root, "in/input"), []byte("original"), 0o644), os.WriteFile(filepath.Join(root, "out/there"), []byte("original"), 0o644)))
			before := listing(t, filepath.Join(root, "in")) + listing(t, filepath.Join(root, "out"))
			host, guest := pair(t)
			for _, f := range frames {
				if e, ok := f.(entry); ok {
					f = append([]byte{frameEntry}, must.Get(json.Marshal(e))(t)...)
				}
				must.Succeed(t, guest.send(f.([]byte)))
			}
			must.Succeed(t, guest.end())
			treeErr, err := receiveTree(host, openDir(t, root), []string{"out"}, receipt{128, 4})
			if treeErr == nil || err != nil || !strings.Contains(treeErr.Error(), wants[name]) {
				t.Errorf("got %v and %v, want an error of the tree with %q", treeErr, err, wants[name])
			}
			for _, p := range []string{"out/there", "in/input"} {
				if got := string(must.Get(os.ReadFile(filepath.Join(root, p)))(t)); got != "original" {
					t.Errorf("%s contains %q", p, got)
				}
			}
			if after := listing(t, filepath.Join(root, "in")); !strings.HasPrefix(before, after) || len(must.Get(os.ReadDir(top))(t)) != 1 ||
				len(must.Get(os.ReadDir(root))(t)) != 2 {
				t.Errorf("something was created outside the output: %s", listing(t, top))
			}
		})
	}
}

// TestLargeTreesTakeNoMemory: what a receiver keeps does not grow with the number and the paths of a tree's files.
func TestLargeTreesTakeNoMemory(t *testing.T) {
	root := t.TempDir()
	r := &receiver{root: openDir(t, root), dirs: []string{"."}, room: 1, files: 1 << 30, parent: -1, file: -1}
	deep := strings.Repeat("x", 250)
	for {
		must.Succeed(t, r.create(&entry{Path: deep, Mode: unix.S_IFDIR | 0o755}))
		if len(deep) > 3500 {
			break
		}
		deep += "/" + strings.Repeat("x", 250)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 5000 {
		kind := []uint32{unix.S_IFREG, unix.S_IFDIR}[i%2]
		must.Succeed(t, errors.Join(r.create(&entry{Path: fmt.Sprintf("%s/%d", deep, i), Mode: kind | 0o755}), r.endFile()))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 { // the paths are 18 MB
		t.Errorf("5000 files take %d bytes", grown)
	}
	must.Succeed(t, r.finish())
}

// TestLongFramesAreRefused: a guest cannot make this process allocate arbitrary amounts of memory.
func TestLongFramesAreRefused(t *testing.T) {
	host, guest := pair(t)
	must.Get(guest.file.Write([]byte{0xff, 0xff, 0xff, 0x7f}))(t)
	if b, err := host.receive(maxMessage); err == nil {
		t.Errorf("got a frame of %d bytes", len(b))
	}
	host, guest = pair(t)
	must.Get(guest.file.Write([]byte{0xff, 0xff, 0xff, 0x7f}))(t)
	if err := newFileServer().serve(host); err == nil || !strings.Contains(err.Error(), "FUSE request of") {
		t.Errorf("got %v, want an error about the request", err)
	}
}

// TestLongListsTakeNoMemory: a short answer with a long list is refused before it takes a multiple of its length.
func TestLongListsTakeNoMemory(t *testing.T) {
	for field, element := range map[string]string{"Events": "{}", "Opened": `""`, "Executed": `""`} {
		text := `{"Result":{"` + field + `":[` + strings.Repeat(element+",", 1<<20-1) + element + `]}}`
		must.Be(t, len(text) < maxAnswer, "%d bytes", len(text))
		host, guest := pair(t)
		sent := make(chan error, 1)
		go func() { sent <- guest.send([]byte(text)) }()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var a runAnswer
		must.Succeed(t, host.receiveMessage(&a, maxAnswer))
		_, err := a.Result.checked(&sandbox.Spec{})
		runtime.ReadMemStats(&after)
		must.Succeed(t, <-sent)
		if took := after.TotalAlloc - before.TotalAlloc; err == nil || !strings.Contains(err.Error(), "a list of more than") || took > 32<<20 {
			t.Errorf("%s: got %v and %d bytes allocated, want an error and at most 32 MiB", field, err, took)
		}
	}
}

// TestMalformedResultsAreRefused: a result that no run of its spec has is an error.
func TestMalformedResultsAreRefused(t *testing.T) {
	good := func() (*sandbox.Spec, *sandbox.Result) {
		s := &sandbox.Spec{
			Inputs: []sandbox.Input{{Target: "/usr"}, {Target: "/bin/x"}}, Outputs: []sandbox.Output{{Target: "/out"}}, Temp: []sandbox.Temp{{Target: "/tmp"}},
		}
		return s, &sandbox.Result{
			ExitCode: 137, Signal: 9, Executed: []string{"/bin/x", "/out/y", "/usr/x"}, ExecutedAll: true,
			Events: []sandbox.Event{
				{Kind: sandbox.EventWrite, Subject: "/usr/x", Count: 1},
				{Kind: sandbox.EventConnect, Subject: "tcp 192.0.2.1:1", Count: 1, Endpoint: sandbox.Endpoint{Host: "192.0.2.1", Port: 1}},
			},
			Exceeded: &sandbox.Event{Kind: sandbox.EventLimit, Subject: "memory", Count: 1, Unit: "bytes"},
		}
	}
	must.Succeed(t, check(good()))
	s, res := good()
	res.Exceeded = limit.FullTemp(s.Temp[0])
	must.Succeed(t, check(s, res))
	for name, c := range map[string]struct {
		change func(*sandbox.Spec, *sandbox.Result)
		want   string
	}{
		"exit code":      {func(_ *sandbox.Spec, r *sandbox.Result) { r.ExitCode, r.Signal = 300, 0 }, "exit code 300"},
		"negative":       {func(_ *sandbox.Spec, r *sandbox.Result) { r.ExitCode, r.Signal = -1, 0 }, "exit code -1"},
		"signal":         {func(_ *sandbox.Spec, r *sandbox.Result) { r.Signal = 11 }, "exit code 137 with signal 11"},
		"kind":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[0].Kind = sandbox.EventAllowed }, "an event of kind"},
		"count":          {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[0].Count = 0 }, "0 times"},
		"exceeded":       {func(_ *sandbox.Spec, r *sandbox.Result) { r.Exceeded = &sandbox.Event{} }, "exceeded an event of kind"},
		"exceeded write": {func(_ *sandbox.Spec, r *sandbox.Result) { r.Exceeded = &r.Events[0] }, "exceeded an event of kind"},
		"text":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[0].Detail = strings.Repeat("x", maxText+1) }, "an event of 16385 bytes"},
		"many events":    {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events = make([]sandbox.Event, 2*sandbox.MaxEvents) }, "2000 events"},
		"endpoint":       {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[0].Endpoint.Host = "192.0.2.1" }, "with the endpoint"},
		"name":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[1].Endpoint.Host = "a.example" }, "with the endpoint"},
		"opened":         {func(_ *sandbox.Spec, r *sandbox.Result) { r.Opened = []string{"/usr/x"} }, "not asked for"},
		"no audit":       {func(s *sandbox.Spec, r *sandbox.Result) { s.Audit, r.Events = sandbox.AuditOff, nil }, "not asked for"},
		"unaudited":      {func(s *sandbox.Spec, _ *sandbox.Result) { s.Audit = sandbox.AuditOff }, "without an audit"},
		"relative":       {func(_ *sandbox.Spec, r *sandbox.Result) { r.Executed = []string{"../x"} }, "the executed file"},
		"unclean":        {func(_ *sandbox.Spec, r *sandbox.Result) { r.Executed = []string{"/usr/../x"} }, "the executed file"},
		"outside":        {func(_ *sandbox.Spec, r *sandbox.Result) { r.Executed = []string{"/usrx"} }, "the executed file"},
		"unsorted":       {func(_ *sandbox.Spec, r *sandbox.Result) { slices.Reverse(r.Executed) }, "the executed file"},
		"twice":          {func(_ *sandbox.Spec, r *sandbox.Result) { r.Executed = []string{"/usr/x", "/usr/x"} }, "the executed file"},
		"limit":          {func(_ *sandbox.Spec, r *sandbox.Result) { r.Exceeded.Subject = "room in /elsewhere" }, "unknown limit"},
		"unit":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.Exceeded.Unit = "ns" }, "the unit"},
		"zone":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[1].Endpoint.Host = "fe80::1%\x1b" }, "with the endpoint"},
		"huge count":     {func(_ *sandbox.Spec, r *sandbox.Result) { r.Events[0].Count = math.MaxInt }, "an event of kind"},
		"unrecorded":     {func(_ *sandbox.Spec, r *sandbox.Result) { r.Unrecorded = math.MaxInt }, "unrecorded"},
		"huge usage":     {func(_ *sandbox.Spec, r *sandbox.Result) { r.Usage.WrittenBytes = math.MaxInt64 }, "usage"},
		"usage":          {func(_ *sandbox.Spec, r *sandbox.Result) { r.Usage.User = -1 }, "usage"},
		"kill":           {func(_ *sandbox.Spec, r *sandbox.Result) { r.KilledForViolation = true }, "killed for a violation"},
	} {
		s, res := good()
		c.change(s, res)
		if err := check(s, res); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, c.want)
		}
	}
	if _, err := (*untrusted)(nil).checked(&sandbox.Spec{}); err == nil {
		t.Error("no result was accepted")
	}
}

// TestListsOfResultsAreKnown: each list in a result is counted before it is decoded.
func TestListsOfResultsAreKnown(t *testing.T) {
	var lists []string
	for field := range reflect.TypeFor[untrusted]().Fields() {
		if field.Type == reflect.TypeFor[json.RawMessage]() {
			lists = append(lists, field.Name)
		}
	}
	var walk func(reflect.Type, string)
	walk = func(typ reflect.Type, name string) {
		switch typ.Kind() {
		case reflect.Pointer:
			walk(typ.Elem(), name)
		case reflect.Struct:
			if typ == reflect.TypeFor[time.Time]() {
				return
			}
			for field := range typ.Fields() {
				walk(field.Type, field.Name)
			}
		case reflect.Slice, reflect.Array, reflect.Map, reflect.Interface:
			if !slices.Contains(lists, name) {
				t.Errorf("the field %s is decoded as it comes", name)
			}
		}
	}
	walk(reflect.TypeFor[sandbox.Result](), "Result")
}

// TestKernelsOfRootBoot: QEMU, which is not root, gets copies of the kernel and the initial root that it can read but
// not change.
func TestKernelsOfRootBoot(t *testing.T) {
	image := filepath.Join(t.TempDir(), "vmlinuz")
	must.Succeed(t, os.WriteFile(image, []byte("kernel"), 0o600))
	b := &backend{}
	must.Succeed(t, b.prepare(kernel{image, t.TempDir()}))
	for name, f := range map[string]*os.File{"kernel": b.kernel, "initial root": b.initrd} {
		t.Cleanup(func() { f.Close() })
		info := must.Get(f.Stat())(t)
		seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
		if want := unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL; err != nil || seals&want != want || info.Mode() != 0o444 {
			t.Errorf("%s: got seals %#x, %v, and mode %v, want %#x and 0444", name, seals, err, info.Mode(), want)
		}
	}
	if got := string(must.Get(os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", b.kernel.Fd())))(t)); got != "kernel" {
		t.Errorf("got the kernel %q", got)
	}
}

// TestConsoleIsPrintable: text of a machine neither forges lines nor controls terminals.
func TestConsoleIsPrintable(t *testing.T) {
	var c console
	for range 2 {
		_, _ = c.Write([]byte("one\x1b[2J\r\ntwo \u009b\xff\n")) // never fails
	}
	if got, want := c.String(), `one\x1b[2J; two \u009b\xff; one\x1b[2J; two \u009b\xff`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	_, _ = c.Write(make([]byte, 10*maxConsole))
	if len(c.text) > maxConsole {
		t.Errorf("%d bytes are kept, want at most %d", len(c.text), maxConsole)
	}
}

// TestSharedFilesCannotBeChanged: QEMU cannot change the kernel and the initial root that all machines share.
func TestSharedFilesCannotBeChanged(t *testing.T) {
	f, err := sealed("test", []byte("text"))
	must.Succeed(t, err)
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write: got %v, want EPERM", err)
	}
	if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: got %v, want EPERM", err)
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EPERM) {
		t.Errorf("mmap: got %v, want EPERM", err)
	}
	if got := string(must.Get(os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd())))(t)); got != "text" {
		t.Errorf("got %q", got)
	}
}

// TestGuestsLackVirtualization: guests cannot use the host's code for nested virtualization and performance counters, and
// dumps of QEMU contain no memory of the guest.
func TestGuestsLackVirtualization(t *testing.T) {
	args := (&backend{}).arguments()
	for flag, wants := range map[string][]string{"-cpu": {"vmx=off", "svm=off", "pmu=off"}, "-machine": {"dump-guest-core=off"}} {
		value := args[slices.Index(args, flag)+1]
		for _, want := range wants {
			if !slices.Contains(strings.Split(value, ","), want) {
				t.Errorf("%s %s lacks %s", flag, value, want)
			}
		}
	}
}

// TestMemoryIsNotOvercommitted: all machines together have at most half of the host's memory, but one has 1 GiB.
func TestMemoryIsNotOvercommitted(t *testing.T) {
	for _, c := range []struct {
		host     int64
		cpus     int
		memory   int64
		machines int
	}{
		{0, 8, 1 << 30, 1},
		{3 << 30, 8, 3 << 29, 1},
		{8 << 30, 1, 2 << 30, 2},
		{24 << 30, 2, 6 << 30, 2},
		{32 << 30, 64, 1 << 30, 16},
		{1 << 40, 16, 8 << 30, 16},
		{1 << 50, 1 << 20, 8 << 30, zygote.MaxSlots},
	} {
		if memory, machines := shares(c.host, c.cpus); memory != c.memory || machines != c.machines {
			t.Errorf("%d MiB, %d processors: got %d MiB for each of %d machines, want %d and %d", c.host>>20, c.cpus, memory>>20, machines,
				c.memory>>20, c.machines)
		}
	}
}

// TestQEMUIsLimited: QEMU has what its machine needs, of each resource that this host can limit.
func TestQEMUIsLimited(t *testing.T) {
	b := &backend{memory: 2 << 30}
	none := cgroup.Limits{Memory: cgroup.Unlimited, Processes: cgroup.Unlimited, MilliCPUs: cgroup.Unlimited, DiskRate: cgroup.Unlimited}
	if got := b.limits(cgroup.Capabilities{}); got != none {
		t.Errorf("a host that limits nothing: got %+v", got)
	}
	want := cgroup.Limits{Memory: 3 << 30, Processes: 64, MilliCPUs: 3000, DiskRate: cgroup.Unlimited}
	if got := b.limits(cgroup.Capabilities{LimitMemory: true, LimitProcesses: true, LimitCPUs: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
