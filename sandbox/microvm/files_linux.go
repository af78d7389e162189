// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Numbers of the FUSE protocol (fuse(4), include/uapi/linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opReadlink    = 5
	opRead        = 15
	opStatfs      = 17
	opInit        = 26
	opReaddir     = 28
	opInterrupt   = 36
	opBatchForget = 42

	fuseMajor       = 7
	fuseMinor       = 31
	fuseAsyncRead   = 1 << 0
	fuseAutoInval   = 1 << 12
	fuseNoOpen      = 1 << 17
	fuseParallelDir = 1 << 18
	fuseNoOpenDir   = 1 << 24

	inHeader  = 40
	outHeader = 16
	fuseRoot  = 1

	// maxRead bounds what one request reads, in bytes, and maxRequest a request.
	maxRead    = 128 << 10
	maxRequest = 64 << 10
	// maxNodes bounds the files that a guest knows at a time.
	maxNodes = 256 << 10
	// validity is how long a guest may cache the name and attributes of a file, in seconds. Files may change between the
	// runs of an emulated machine.
	validity = 1
)

// A fileServer serves directories and files of this host to a guest, which mounts them with FUSE. It is read-only,
// serves only what is below its sources, and follows no links. Its requests come from a kernel that may be hostile.
type fileServer struct {
	mu      sync.Mutex // held during a request
	sources []int      // O_PATH descriptors; source i is the file first+i of the root
	first   int        // names are never reused, because guests cache them
	nodes   map[uint64]*node
	names   map[nodeKey]uint64
	last    uint64
	buf     []byte
}

// A node is a file that the guest knows. It holds a name, not a descriptor, because descriptors are scarce.
type node struct {
	nodeKey
	lookups  uint64 // those that the guest has not forgotten
	children uint64 // nodes inside
}

type nodeKey struct {
	parent uint64
	name   string
}

func newFileServer() *fileServer {
	return &fileServer{nodes: map[uint64]*node{}, names: map[nodeKey]uint64{}, last: fuseRoot, buf: make([]byte, maxRead)}
}

// serveAs answers requests until the port ends, with the rights of a user without groups: a hostile guest ignores the
// modes of files. The calling thread must end afterwards.
func (s *fileServer) serveAs(user int, p *port) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 { // of this thread only, unlike unix.Setgroups
		return fmt.Errorf("leave the groups of this process: %w", errno)
	}
	for _, set := range []func(int) (int, error){unix.SetfsgidRetGid, unix.SetfsuidRetUid} { // the second drops capabilities
		_, err := set(user)
		if err != nil {
			return err
		}
		if now, err := set(-1); err != nil || now != user { // -1 only reads
			return fmt.Errorf("become user %d: %w", user, cmp.Or(err, error(unix.EPERM)))
		}
	}
	return s.serve(p)
}

// serve answers requests until the port ends.
func (s *fileServer) serve(p *port) error {
	for {
		var head [4]byte
		if _, err := io.ReadFull(p.in, head[:]); err != nil {
			return err
		}
		n := binary.LittleEndian.Uint32(head[:])
		if n < inHeader || n > maxRequest {
			return fmt.Errorf("a FUSE request of %d bytes", n)
		}
		request := make([]byte, n)
		if _, err := io.ReadFull(p.in, request[4:]); err != nil {
			return err
		}
		le := binary.LittleEndian
		op, unique, id, body := le.Uint32(request[4:]), le.Uint64(request[8:]), le.Uint64(request[16:]), request[inHeader:]
		out := s.handle(op, unique, id, body)
		if out == nil {
			continue
		}
		if _, err := p.file.Write(out); err != nil {
			return err
		}
	}
}

// serveFrom replaces the sources, which it takes over. The new ones have other names, from s.first.
func (s *fileServer) serveFrom(sources []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	closeAll(s.sources)
	s.first += len(s.sources)
	s.sources = sources
}

// handle returns the answer to a request, or nil if it has none.
func (s *fileServer) handle(op uint32, unique, id uint64, body []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forget(op, id, body) {
		return nil
	}
	answer, err := s.answer(op, id, body)
	le := binary.LittleEndian
	out := make([]byte, outHeader, outHeader+len(answer))
	le.PutUint64(out[8:], unique)
	if err != nil {
		errno := syscall.EIO
		errors.As(err, &errno)
		le.PutUint32(out[4:], uint32(-int32(errno)))
	} else {
		out = append(out, answer...)
	}
	le.PutUint32(out, uint32(len(out)))
	return out
}

// forget handles the requests that have no answer.
func (s *fileServer) forget(op uint32, id uint64, body []byte) bool {
	le := binary.LittleEndian
	switch op {
	case opForget:
		if len(body) >= 8 {
			s.drop(id, le.Uint64(body))
		}
	case opBatchForget: // a count, and for each a node and its lookups
		for b := body[min(8, len(body)):]; len(b) >= 16; b = b[16:] {
			s.drop(le.Uint64(b), le.Uint64(b[8:]))
		}
	case opInterrupt: // every request is short
	default:
		return false
	}
	return true
}

// drop removes lookups of a node, then the node if it has neither lookups nor children, and then its parents likewise.
func (s *fileServer) drop(id, lookups uint64) {
	n := s.nodes[id]
	if n == nil {
		return
	}
	n.lookups -= min(n.lookups, lookups)
	for n != nil && n.lookups == 0 && n.children == 0 {
		delete(s.nodes, id)
		delete(s.names, n.nodeKey)
		id = n.parent
		if n = s.nodes[id]; n != nil {
			n.children--
		}
	}
}

func (s *fileServer) answer(op uint32, id uint64, body []byte) ([]byte, error) {
	le := binary.LittleEndian
	switch op {
	case opInit:
		return s.init(body)
	case opLookup:
		if len(body) == 0 || body[len(body)-1] != 0 {
			return nil, syscall.EINVAL
		}
		return s.lookup(id, string(body[:len(body)-1]))
	case opGetattr:
		st, err := s.stat(id)
		if err != nil {
			return nil, err
		}
		return appendAttr(le.AppendUint64(le.AppendUint64(nil, validity), 0), id, st), nil
	case opReadlink:
		return s.readlink(id)
	case opStatfs: // nothing is free
		out := make([]byte, 80)
		le.PutUint32(out[40:], 4096)
		le.PutUint32(out[44:], 255) // length of names
		le.PutUint32(out[48:], 4096)
		return out, nil
	case opRead, opReaddir:
		if len(body) < 20 {
			return nil, syscall.EINVAL
		}
		offset, size := int64(le.Uint64(body[8:])), int(min(le.Uint32(body[16:]), maxRead))
		if offset < 0 {
			return nil, syscall.EINVAL
		}
		if op == opReaddir {
			return s.readdir(id, offset, size)
		}
		return s.read(id, offset, size)
	}
	return nil, syscall.ENOSYS // the kernel does not ask again
}

func (s *fileServer) init(body []byte) ([]byte, error) {
	le := binary.LittleEndian
	if len(body) < 16 || le.Uint32(body) != fuseMajor || le.Uint32(body[4:]) < fuseMinor {
		return nil, syscall.EPROTO
	}
	const want = fuseAsyncRead | fuseAutoInval | fuseNoOpen | fuseParallelDir | fuseNoOpenDir
	out := make([]byte, 64)
	le.PutUint32(out, fuseMajor)
	le.PutUint32(out[4:], fuseMinor)
	le.PutUint32(out[8:], maxRead) // read ahead
	le.PutUint32(out[12:], le.Uint32(body[12:])&want)
	le.PutUint32(out[20:], 4096) // of a write
	le.PutUint32(out[24:], 1)    // granularity of times in nanoseconds
	return out, nil
}

// open returns a descriptor (O_PATH) of a node other than the root. The caller closes it.
func (s *fileServer) open(id uint64) (int, error) {
	where := ""
	for {
		n := s.nodes[id]
		if n == nil {
			return -1, syscall.ESTALE
		}
		if n.parent == fuseRoot {
			source := s.source(n.name)
			if source < 0 {
				return -1, syscall.ESTALE
			}
			if where == "" {
				return unix.FcntlInt(uintptr(source), unix.F_DUPFD_CLOEXEC, 0)
			}
			fd, err := openBeneath(source, where, unix.O_PATH|unix.O_NOFOLLOW)
			if err == unix.ENOTDIR || err == unix.ELOOP { // another file since the lookup
				err = syscall.ESTALE
			}
			return fd, err
		}
		where, id = path.Join(n.name, where), n.parent
	}
}

// source returns the source of that name, or -1.
func (s *fileServer) source(name string) int {
	number, err := strconv.Atoi(name)
	if i := number - s.first; err == nil && i >= 0 && i < len(s.sources) && strconv.Itoa(number) == name {
		return s.sources[i]
	}
	return -1
}

func (s *fileServer) stat(id uint64) (*unix.Stat_t, error) {
	if id == fuseRoot {
		return &unix.Stat_t{Mode: unix.S_IFDIR | 0o755, Nlink: 2, Ino: fuseRoot}, nil
	}
	fd, err := s.open(id)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	return &st, unix.Fstat(fd, &st)
}

// lookup returns a file of a directory. One that does not exist is node 0, which the guest remembers, too.
func (s *fileServer) lookup(dir uint64, name string) ([]byte, error) {
	if name == "" || name == "." || name == ".." || len(name) > 255 || path.Base(name) != name {
		return nil, syscall.EINVAL
	}
	if dir == fuseRoot {
		if s.source(name) < 0 {
			return nil, syscall.ENOENT // not remembered, since there may be more sources later
		}
	} else if s.nodes[dir] == nil {
		return nil, syscall.ESTALE
	}
	key := nodeKey{dir, name}
	id, known := s.names[key]
	if !known {
		if len(s.nodes) >= maxNodes {
			return nil, syscall.ENFILE
		}
		s.last++
		id = s.last
		s.nodes[id] = &node{nodeKey: key}
	}
	st, err := s.stat(id)
	if err != nil {
		if !known {
			delete(s.nodes, id)
		}
		if !errors.Is(err, syscall.ENOENT) {
			return nil, err
		}
		id, st = 0, &unix.Stat_t{}
	} else {
		if !known {
			s.names[key] = id
			if parent := s.nodes[dir]; parent != nil {
				parent.children++
			}
		}
		s.nodes[id].lookups++
	}
	le := binary.LittleEndian
	out := le.AppendUint64(nil, id)
	for _, v := range []uint64{0, validity, validity, 0} { // generation; name, attributes; nanoseconds of both
		out = le.AppendUint64(out, v)
	}
	return appendAttr(out, id, st), nil
}

// appendAttr appends the attributes of a file. Its number in the guest is that of its node.
func appendAttr(b []byte, id uint64, st *unix.Stat_t) []byte {
	le := binary.LittleEndian
	for _, v := range []uint64{
		id, uint64(st.Size), uint64(st.Blocks), uint64(st.Mtim.Sec), uint64(st.Mtim.Sec), uint64(st.Ctim.Sec),
	} {
		b = le.AppendUint64(b, v)
	}
	for _, v := range []uint32{
		uint32(st.Mtim.Nsec), uint32(st.Mtim.Nsec), uint32(st.Ctim.Nsec), st.Mode, uint32(st.Nlink), st.Uid, st.Gid, 0, 4096, 0,
	} {
		b = le.AppendUint32(b, v)
	}
	return b
}

func (s *fileServer) readlink(id uint64) ([]byte, error) {
	fd, err := s.open(id)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	return buf[:max(n, 0)], err
}

// reopen returns a descriptor for reading a file of a type. The caller closes it.
func (s *fileServer) reopen(id uint64, mode uint32, flags int) (int, error) {
	fd, err := s.open(id)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, err
	}
	if st.Mode&unix.S_IFMT != mode { // opening a device or a pipe may do something
		return -1, syscall.EINVAL
	}
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
}

func (s *fileServer) read(id uint64, offset int64, size int) ([]byte, error) {
	fd, err := s.reopen(id, unix.S_IFREG, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	done := 0
	for done < size { // to the guest, a short read is the end of the file
		n, err := unix.Pread(fd, s.buf[done:size], offset+int64(done))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		done += n
	}
	return s.buf[:done], nil
}

// readdir returns entries of a directory. Offsets are those of this host's directory.
func (s *fileServer) readdir(id uint64, offset int64, size int) ([]byte, error) {
	if id == fuseRoot {
		return nil, nil // guests know the names
	}
	fd, err := s.reopen(id, unix.S_IFDIR, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if _, err := unix.Seek(fd, offset, unix.SEEK_SET); err != nil {
		return nil, err
	}
	// A linux_dirent64 is at most 8 bytes shorter than the guest's entry: its header has 19 bytes, not 24, and both are
	// padded to 8.
	buf := make([]byte, max(size*2/3, 1024))
	n, err := unix.ReadDirent(fd, buf)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	var out []byte
	for b := buf[:n]; len(b) >= 19; { // struct linux_dirent64: ino, off, reclen, type, name
		length := int(le.Uint16(b[16:]))
		name := b[19:length]
		for i, c := range name {
			if c == 0 {
				name = name[:i]
				break
			}
		}
		if len(out)+24+len(name)+7 > size {
			break
		}
		out = append(out, b[:16]...) // ino and off
		out = le.AppendUint32(out, uint32(len(name)))
		out = le.AppendUint32(out, uint32(b[18]))
		out = append(out, name...)
		out = append(out, make([]byte, -len(out)&7)...)
		b = b[length:]
	}
	return out, nil
}
