// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// temporary matches names of temporary files, which the C library chooses at random: gcc passes them to the programs it
// starts.
var temporary = regexp.MustCompile(`/tmp/[^/\x00]*`)

// A random is the random numbers of a run. Each executed program has its own stream, which depends on its arguments,
// without names of temporary files, and on how many programs with the same arguments started before it; so concurrent
// programs do not take numbers from each other. Threads share a stream in the order of their calls. It belongs to the
// session.
type random struct {
	seed    uint64
	streams map[uint32]*stream // by process ID
	enough  int                // number of streams at which those of dead processes are removed
	begun   map[[sha256.Size]byte]int
	file    int // file that replaces the devices, or -1 before one is opened
	piece   [64 << 10]byte
}

// A stream is the random numbers of a process.
type stream struct {
	*rand.ChaCha8
	key   [sha256.Size]byte
	forks int // children that read numbers without executing a program
}

const (
	// maxRandom is the most that one call gets. The kernel may return less than requested as well.
	maxRandom = 1 << 20
	// fileSize is the size of the file that replaces the devices, fileStart the highest offset to start at.
	fileSize  = 16 << 20
	fileStart = 8 << 20
	// fewStreams is the lowest number of streams at which dead processes are looked for.
	fewStreams = 1000
	// maxArguments is how many bytes of the arguments distinguish programs.
	maxArguments = 64 << 10
)

// newRandom returns the random numbers of a run, or nil if it has the kernel's.
func newRandom(c *sandbox.Conditions) *random {
	if c.RandomSeed == 0 {
		return nil
	}
	return &random{seed: c.RandomSeed, streams: map[uint32]*stream{}, enough: fewStreams, begun: map[[sha256.Size]byte]int{}, file: -1}
}

// close closes the file.
func (r *random) close() {
	if r != nil && r.file >= 0 {
		unix.Close(r.file)
	}
}

// derive returns a new stream, the same for the same seed, text and number.
func (r *random) derive(kind string, text []byte, number int) *stream {
	key := sha256.Sum256(fmt.Appendf(nil, "%d %s %d %s", r.seed, kind, number, text))
	return &stream{ChaCha8: rand.NewChaCha8(key), key: key}
}

// begin gives a process the stream of the program that it executes.
func (r *random) begin(process uint32) *stream {
	arguments := make([]byte, 0, 512)
	if f, err := os.Open(fmt.Sprintf("/proc/%d/cmdline", process)); err == nil {
		b := bytes.NewBuffer(arguments)
		_, _ = io.Copy(b, io.LimitReader(f, maxArguments)) // the process may be gone
		f.Close()
		arguments = b.Bytes()
	}
	arguments = temporary.ReplaceAll(arguments, []byte("/tmp/"))
	id := sha256.Sum256(arguments)
	if len(r.begun) >= maxPrograms {
		id = [sha256.Size]byte{}
	}
	r.begun[id]++
	return r.keep(process, r.derive("program", arguments, r.begun[id]))
}

// of returns the stream of a process; one without was forked by another.
func (r *random) of(thread uint32) *stream {
	process, parent := lineage(thread)
	if s := r.streams[process]; s != nil {
		return s
	}
	from := r.streams[parent]
	if from == nil {
		from = r.keep(0, cmp.Or(r.streams[0], r.derive("nobody", nil, 0)))
	}
	from.forks++
	return r.keep(process, r.derive("fork", from.key[:], from.forks))
}

// keep stores the stream of a process.
func (r *random) keep(process uint32, s *stream) *stream {
	if len(r.streams) >= r.enough {
		maps.DeleteFunc(r.streams, func(process uint32, _ *stream) bool {
			return process != 0 && errors.Is(unix.Kill(int(process), 0), unix.ESRCH)
		})
		r.enough = max(fewStreams, 2*len(r.streams))
	}
	r.streams[process] = s
	return s
}

// answerRandom answers a call that reads random numbers or opens their devices, and reports whether it was one.
func (w *session) answerRandom(n *notification, name string) bool {
	switch name {
	case "getrandom":
		w.answerGetrandom(n)
		return true
	case "open", "openat", "openat2":
		return w.openRandom(n, name)
	}
	return false
}

// answerGetrandom answers getrandom(2).
func (w *session) answerGetrandom(n *notification) {
	switch flags := uint32(n.Args[2]); {
	case flags&^(unix.GRND_NONBLOCK|unix.GRND_RANDOM|unix.GRND_INSECURE) != 0,
		flags&unix.GRND_RANDOM != 0 && flags&unix.GRND_INSECURE != 0:
		w.queue.fail(n.ID, unix.EINVAL)
		return
	}
	m, err := w.memory(n)
	if err != nil {
		w.cannotAnswer(n, err)
		return
	}
	defer m.close()
	from := w.random.of(n.PID)
	want, given := min(n.Args[1], maxRandom), uint64(0)
	for given < want {
		b := w.random.piece[:min(want-given, uint64(len(w.random.piece)))]
		_, _ = from.Read(b) // never fails
		if !m.write(n.Args[0]+given, b) {
			w.queue.fail(n.ID, unix.EFAULT)
			return
		}
		given += uint64(len(b))
	}
	w.queue.value(n.ID, int64(given))
}

// openRandom answers opening /dev/random or /dev/urandom for reading with a file, and reports whether it did.
func (w *session) openRandom(n *notification, name string) bool {
	flags := openFlags(n, name)
	if flags&unix.O_ACCMODE == unix.O_WRONLY || flags&unix.O_PATH != 0 {
		return false
	}
	o := operands[name][0]
	p, ok := w.path(n, o)
	if !ok {
		return false
	}
	if at := w.resolve(n.PID, p, o.followed(n, flags)); at.path != "/dev/random" && at.path != "/dev/urandom" {
		return false
	}
	fd, err := w.random.open(w.random.of(n.PID))
	if err != nil {
		w.cannotAnswer(n, err)
		return true
	}
	defer unix.Close(fd)
	switch err := w.queue.sendFD(n.ID, fd, uint32(flags&unix.O_CLOEXEC)); err {
	case nil, unix.ENOENT: // it is gone
	case unix.EMFILE:
		w.queue.fail(n.ID, unix.EMFILE)
	default:
		w.cannotAnswer(n, fmt.Errorf("send random numbers: %w", err))
	}
	return true
}

// open returns a descriptor of the file of random numbers. A run has one file; the random part is the offset at which
// reading starts.
func (r *random) open(from *stream) (int, error) {
	if r.file < 0 {
		if err := r.fill(); err != nil {
			return -1, fmt.Errorf("file of random numbers: %w", err)
		}
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", r.file), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("file of random numbers: %w", err)
	}
	if _, err := unix.Seek(fd, int64(from.Uint64()%fileStart), unix.SEEK_SET); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("file of random numbers: %w", err)
	}
	return fd, nil
}

// fill creates the file, sealed.
func (r *random) fill() error {
	fd, err := unix.MemfdCreate("random", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err
	}
	numbers := r.derive("devices", nil, 0)
	for n := 0; n < fileSize && err == nil; n += len(r.piece) {
		_, _ = numbers.Read(r.piece[:])
		_, err = unix.Write(fd, r.piece[:])
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	r.file = fd
	return nil
}
