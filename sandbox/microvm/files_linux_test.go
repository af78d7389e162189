// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// serverOf returns a server of the files in a directory.
func serverOf(t *testing.T, dir string) *fileServer {
	t.Helper()
	s := newFileServer()
	s.serveFrom([]int{must.Get(unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0))(t)})
	t.Cleanup(func() { s.serveFrom(nil) })
	return s
}

// ask sends a request to the server and returns its answer.
func ask(t *testing.T, s *fileServer, op uint32, id uint64, body []byte) ([]byte, syscall.Errno) {
	t.Helper()
	out := s.handle(op, 7, id, body)
	if len(out) < outHeader || int(binary.LittleEndian.Uint32(out)) != len(out) || binary.LittleEndian.Uint64(out[8:]) != 7 {
		t.Fatalf("got the answer %x", out)
	}
	return out[outHeader:], syscall.Errno(-int32(binary.LittleEndian.Uint32(out[4:])))
}

// lookUp returns the number of a file.
func lookUp(t *testing.T, s *fileServer, dir uint64, name string) (uint64, syscall.Errno) {
	t.Helper()
	out, errno := ask(t, s, opLookup, dir, append([]byte(name), 0))
	if errno != 0 {
		return 0, errno
	}
	return binary.LittleEndian.Uint64(out), 0
}

// readAt returns the body of a request to read.
func readAt(offset uint64, size uint32) []byte {
	body := binary.LittleEndian.AppendUint64(make([]byte, 8), offset)
	return append(binary.LittleEndian.AppendUint32(body, size), make([]byte, 20)...)
}

// TestFilesOutsideTheSourcesAreNotServed: the file server finds what is in its sources and nothing else, whatever it is
// asked.
func TestFilesOutsideTheSourcesAreNotServed(t *testing.T) {
	top := t.TempDir()
	at := func(name string) string { return filepath.Join(top, name) }
	must.Succeed(t, errors.Join(os.MkdirAll(at("source/dir"), 0o755), os.WriteFile(at("source/dir/file"), []byte("text"), 0o644),
		os.WriteFile(at("secret"), []byte("secret"), 0o644), os.Symlink("../secret", at("source/link")), os.Symlink("..", at("source/up")),
		unix.Mkfifo(at("source/pipe"), 0o644)))
	s := serverOf(t, at("source"))

	root, errno := lookUp(t, s, fuseRoot, "0")
	must.Be(t, errno == 0 && root != 0, "the source: %v", errno)
	dir, _ := lookUp(t, s, root, "dir")
	file, _ := lookUp(t, s, dir, "file")
	if text, errno := ask(t, s, opRead, file, readAt(1, 100)); errno != 0 || string(text) != "ext" {
		t.Errorf("got %q, %v, want the file", text, errno)
	}
	names, _ := ask(t, s, opReaddir, root, readAt(0, 4096))
	for _, name := range []string{"dir", "link", "pipe"} {
		if !strings.Contains(string(names), name) {
			t.Errorf("the directory lacks %s: %q", name, names)
		}
	}
	for _, name := range []string{"..", ".", "", "../secret", "dir/file", "/etc/passwd", strings.Repeat("x", 300)} {
		if id, errno := lookUp(t, s, root, name); errno == 0 {
			t.Errorf("looking up %.20q found %d", name, id)
		}
	}
	if id, errno := lookUp(t, s, root, "absent"); id != 0 || errno != 0 {
		t.Errorf("an absent file: got %d, %v, want 0", id, errno)
	}
	for _, name := range []string{"1", "-1", "00", "x"} {
		if id, errno := lookUp(t, s, fuseRoot, name); errno != syscall.ENOENT {
			t.Errorf("source %s: got %d, %v, want ENOENT", name, id, errno)
		}
	}
	for _, name := range []string{"link", "up", "pipe"} {
		id, errno := lookUp(t, s, root, name)
		must.Be(t, errno == 0 && id != 0, "%s: %v", name, errno)
		for _, inside := range []string{"secret", "source"} {
			if found, errno := lookUp(t, s, id, inside); found != 0 {
				t.Errorf("through %s: found %d, %v", name, found, errno)
			}
		}
		for _, op := range []uint32{opRead, opReaddir} {
			if text, errno := ask(t, s, op, id, readAt(0, 100)); errno == 0 {
				t.Errorf("reading %s: got %q", name, text)
			}
		}
	}
	// A directory that becomes a link leads nowhere.
	must.Succeed(t, errors.Join(os.Rename(at("source/dir"), at("source/moved")), os.Symlink("..", at("source/dir"))))
	if found, errno := lookUp(t, s, dir, "secret"); found != 0 || errno == 0 {
		t.Errorf("through a replaced directory: found %d, %v", found, errno)
	}
	if text, errno := ask(t, s, opRead, file, readAt(0, 100)); errno == 0 {
		t.Errorf("through a replaced directory: got %q", text)
	}
}

// TestPrivateFilesAreNotServed: a guest reads what every user of this host may read, whatever its kernel permits.
func TestPrivateFilesAreNotServed(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must.Succeed(t, errors.Join(os.Chmod(dir, 0o755), os.WriteFile(at("public"), []byte("text"), 0o644), os.WriteFile(at("secret"), []byte("secret"), 0o640),
		os.Mkdir(at("private"), 0o700), os.WriteFile(at("private/public"), []byte("secret"), 0o644)))
	s := serverOf(t, dir)
	host, guest := pair(t)
	served := make(chan error, 1)
	onThread(func() { served <- s.serveAs(zygote.CommandUser(0), host) })
	t.Cleanup(func() {
		guest.file.Close()
		if err := <-served; !errors.Is(err, io.EOF) {
			t.Errorf("got %v, want EOF", err)
		}
	})
	exchange := func(op uint32, id uint64, body []byte) ([]byte, syscall.Errno) {
		le := binary.LittleEndian
		request := le.AppendUint32(le.AppendUint32(nil, uint32(inHeader+len(body))), op)
		request = le.AppendUint64(le.AppendUint64(request, 7), id)
		must.Get(guest.file.Write(append(append(request, make([]byte, 16)...), body...)))(t)
		head := make([]byte, outHeader)
		must.Get(io.ReadFull(guest.in, head))(t)
		text := make([]byte, le.Uint32(head)-outHeader)
		must.Get(io.ReadFull(guest.in, text))(t)
		return text, syscall.Errno(-int32(le.Uint32(head[4:])))
	}
	find := func(dir uint64, name string) uint64 {
		out, errno := exchange(opLookup, dir, append([]byte(name), 0))
		must.Be(t, errno == 0, "%s: %v", name, errno)
		return binary.LittleEndian.Uint64(out)
	}
	top := find(fuseRoot, "0")
	if text, errno := exchange(opRead, find(top, "public"), readAt(0, 100)); errno != 0 || string(text) != "text" {
		t.Errorf("a public file: got %q, %v", text, errno)
	}
	if names, errno := exchange(opReaddir, top, readAt(0, 4096)); errno != 0 || !strings.Contains(string(names), "secret") {
		t.Errorf("a public directory: got %q, %v", names, errno)
	}
	if text, errno := exchange(opRead, find(top, "secret"), readAt(0, 100)); errno != syscall.EACCES {
		t.Errorf("a private file: got %q, %v, want EACCES", text, errno)
	}
	private := find(top, "private")
	if names, errno := exchange(opReaddir, private, readAt(0, 4096)); errno != syscall.EACCES {
		t.Errorf("a private directory: got %q, %v, want EACCES", names, errno)
	}
	if out, errno := exchange(opLookup, private, []byte("public\x00")); errno != syscall.EACCES {
		t.Errorf("a file in a private directory: got %x, %v, want EACCES", out, errno)
	}
}

// TestMalformedRequestsAreRefused: requests of any operation with short or absurd bodies are errors.
func TestMalformedRequestsAreRefused(t *testing.T) {
	s := serverOf(t, t.TempDir())
	unanswered := []uint32{opForget, opBatchForget, opInterrupt}
	for op := range uint32(60) {
		id, errno := lookUp(t, s, fuseRoot, "0") // the requests before may have forgotten it
		must.Be(t, errno == 0, "operation %d: %v", op, errno)
		for _, body := range [][]byte{nil, {1}, make([]byte, 7), slices.Repeat([]byte{0xff}, 100)} {
			for _, node := range []uint64{0, fuseRoot, id, 1 << 63} {
				out := s.handle(op, 7, node, slices.Clone(body))
				if slices.Contains(unanswered, op) {
					must.Be(t, out == nil, "operation %d: the answer %x, want none", op, out)
					continue
				}
				_, errno := ask(t, s, op, node, slices.Clone(body))
				var want []syscall.Errno
				switch known := node == fuseRoot || node == id; {
				case op == opGetattr && known, op == opStatfs: // needs no body
					want = []syscall.Errno{0}
				case op == opGetattr, op == opReadlink && node != id:
					want = []syscall.Errno{syscall.ESTALE}
				case op == opReadlink: // a directory
					want = []syscall.Errno{syscall.ENOENT, syscall.EINVAL}
				case op == opInit:
					want = []syscall.Errno{syscall.EPROTO}
				case op == opLookup && len(body) == 7: // a name of zeros
					want = []syscall.Errno{syscall.EINVAL, syscall.ENOENT, syscall.ESTALE}
				case op == opLookup, op == opRead, op == opReaddir:
					want = []syscall.Errno{syscall.EINVAL}
				default:
					want = []syscall.Errno{syscall.ENOSYS}
				}
				if !slices.Contains(want, errno) {
					t.Errorf("operation %d of node %d with %x: got %v, want %v", op, node, body, errno, want)
				}
			}
		}
	}
	if _, errno := lookUp(t, s, fuseRoot, "0"); errno != 0 {
		t.Errorf("afterwards: %v", errno)
	}
}

// TestEarlierSourcesAreNotServed: a machine that is kept for another run does not see the directories of earlier ones.
func TestEarlierSourcesAreNotServed(t *testing.T) {
	s := newFileServer()
	t.Cleanup(func() { s.serveFrom(nil) })
	var earlier []uint64
	for i, text := range []string{"one", "two", "three"} {
		dir := t.TempDir()
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), []byte(text), 0o644))
		s.serveFrom([]int{must.Get(unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0))(t)})
		for name := range 5 {
			if _, errno := lookUp(t, s, fuseRoot, strconv.Itoa(name)); (errno == 0) != (name == i) || s.first != i {
				t.Errorf("source %d, first %d: looking up %d: %v", i, s.first, name, errno)
			}
		}
		top, _ := lookUp(t, s, fuseRoot, strconv.Itoa(i))
		file, _ := lookUp(t, s, top, "file")
		if got, errno := ask(t, s, opRead, file, readAt(0, 100)); errno != 0 || string(got) != text {
			t.Errorf("got %q, %v, want %q", got, errno, text)
		}
		for _, id := range earlier {
			if got, errno := ask(t, s, opRead, id, readAt(0, 100)); errno != syscall.ESTALE {
				t.Errorf("the file of an earlier source: got %q, %v, want ESTALE", got, errno)
			}
		}
		earlier = append(earlier, file)
	}
}

// TestGuestsCacheNamesForASecond: files may change between the runs of a machine that is kept.
func TestGuestsCacheNamesForASecond(t *testing.T) {
	s := serverOf(t, t.TempDir())
	found, errno := ask(t, s, opLookup, fuseRoot, []byte("0\x00"))
	must.Be(t, errno == 0, "%v", errno)
	id := binary.LittleEndian.Uint64(found)
	absent, _ := ask(t, s, opLookup, id, []byte("absent\x00"))
	attributes, _ := ask(t, s, opGetattr, id, nil)
	for name, seconds := range map[string][]byte{ // struct fuse_entry_out: nodeid, generation, entry_valid, attr_valid
		"name": found[16:], "attributes": found[24:], "no file": absent[16:], "attributes again": attributes,
	} {
		if got := binary.LittleEndian.Uint64(seconds); got > 1 {
			t.Errorf("%s: valid for %d s, want at most 1", name, got)
		}
	}
}

// TestForgottenFilesTakeNoMemory: what a guest forgets is forgotten here.
func TestForgottenFilesTakeNoMemory(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	s := serverOf(t, dir)
	top, _ := lookUp(t, s, fuseRoot, "0")
	var file uint64
	for range 3 {
		file, _ = lookUp(t, s, top, "file")
		_, _ = lookUp(t, s, top, "absent")
	}
	if len(s.nodes) != 2 || len(s.names) != 2 {
		t.Errorf("got %d nodes, %d names, want 2", len(s.nodes), len(s.names))
	}
	for _, f := range []struct{ id, lookups uint64 }{{file, 3}, {top, 1}, {99, 1}} {
		s.handle(opForget, 7, f.id, binary.LittleEndian.AppendUint64(nil, f.lookups))
	}
	if len(s.nodes) != 0 || len(s.names) != 0 {
		t.Errorf("got %d nodes, %d names, want none", len(s.nodes), len(s.names))
	}
}

// TestForgottenDirectoriesKeepTheirFiles: a directory that a guest forgets too often leaves no nodes behind that cannot
// be forgotten.
func TestForgottenDirectoriesKeepTheirFiles(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), []byte("text"), 0o644))
	s := serverOf(t, dir)
	forget := func(id, lookups uint64) { s.handle(opForget, 7, id, binary.LittleEndian.AppendUint64(nil, lookups)) }
	for range 3 {
		top, _ := lookUp(t, s, fuseRoot, "0")
		file, _ := lookUp(t, s, top, "file")
		forget(top, 1<<40)
		if text, errno := ask(t, s, opRead, file, readAt(0, 100)); errno != 0 || string(text) != "text" {
			t.Errorf("got %q, %v, want the file", text, errno)
		}
		forget(file, 1)
		if len(s.nodes) != 0 || len(s.names) != 0 {
			t.Errorf("got %d nodes, %d names, want none", len(s.nodes), len(s.names))
		}
	}
}
