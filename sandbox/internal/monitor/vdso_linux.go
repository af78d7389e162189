// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Programs ask for the time, and newer ones for random numbers, without entering the kernel: they call functions that
// it has mapped into them (vdso(7)), which no filter sees. Where these are to be answered, they are overwritten by the
// plain system calls, in each program at its first steps.

// A stub is what a function of the vDSO is overwritten with.
type stub struct {
	random bool // for a run with random numbers of its own, else for one with a clock of its own
	offset uint64
	before []byte // what is there
	after  []byte
}

// Entries of the auxiliary vector (getauxval(3)).
const (
	auxRandom = 25 // AT_RANDOM: 16 random bytes
	auxVDSO   = 33 // AT_SYSINFO_EHDR: where the vDSO is
)

// CanAnswer returns nil if the time of day, and random numbers, can be answered on this host for whoever asks, and else
// what is missing.
func CanAnswer() error {
	_, err := stubs()
	return err
}

// stubs are those of this kernel, whose vDSO is the same in every process.
var stubs = sync.OnceValues(func() ([]stub, error) {
	if len(stubCode) == 0 {
		return nil, errors.New("no system call is known by which programs of this architecture begin")
	}
	aux, err := auxiliary("self")
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open memory: %w", err)
	}
	own := memory(fd)
	defer own.close()
	at := aux[auxVDSO]
	if at == 0 {
		return nil, nil // the kernel was told to have none: everybody makes system calls
	}
	// Some kernels let nobody write to what is read-only (proc_mem.force_override). This writes what is there.
	var head [16]byte
	if !own.read(at, head[:]) || !own.write(at, head[:]) {
		return nil, errors.New("the kernel lets nobody write to the read-only memory of a process")
	}
	return findStubs(own.image(at))
})

// maxImage bounds what is read of a vDSO, which has some pages.
const maxImage = 64 << 10

// image returns what is mapped from an address on.
func (m memory) image(at uint64) []byte {
	var image []byte
	var page [pageSize]byte
	for len(image) < maxImage && m.read(at+uint64(len(image)), page[:]) {
		image = append(image, page[:]...)
	}
	return image
}

// findStubs returns where in a vDSO the functions of stubCode are.
func findStubs(image []byte) ([]stub, error) {
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("vDSO: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("vDSO: %w", err)
	}
	var found []stub
	clock := false
	for _, s := range symbols {
		code, ok := stubCode[s.Name]
		if !ok {
			continue
		}
		if n := uint64(len(code.code)); s.Size < n || s.Value > uint64(len(image))-n {
			return nil, fmt.Errorf("vDSO: %s has %d bytes at %#x", s.Name, s.Size, s.Value)
		}
		clock = clock || s.Name == "__vdso_clock_gettime"
		found = append(found, stub{code.random, s.Value, image[s.Value:][:len(code.code)], code.code})
	}
	if !clock {
		return nil, errors.New("vDSO: it has no __vdso_clock_gettime")
	}
	return found, nil
}

// auxiliary returns the auxiliary vector of a process.
func auxiliary(pid string) (map[uint64]uint64, error) {
	b, err := os.ReadFile("/proc/" + pid + "/auxv")
	if err != nil {
		return nil, fmt.Errorf("auxiliary vector: %w", err)
	}
	aux := map[uint64]uint64{}
	for ; len(b) >= 16; b = b[16:] {
		aux[binary.NativeEndian.Uint64(b)] = binary.NativeEndian.Uint64(b[8:])
	}
	return aux, nil
}

// begin answers the call by which a program begins, when it can ask for what the run is to be told.
func (w *watch) begin(n *notification) {
	if err := w.overwrite(n); err != nil {
		w.lost(n, err)
		return
	}
	w.queue.proceed(n.ID)
}

// overwrite puts the stubs into a program, and random bytes in place of those that the kernel gave it.
func (w *watch) overwrite(n *notification) error {
	all, err := stubs()
	if err != nil {
		return err
	}
	aux, err := auxiliary(fmt.Sprint(n.PID))
	if err != nil {
		return err
	}
	m, err := w.memory(n) // after which all that was read is known to be of this process
	if err != nil {
		return err
	}
	defer m.close()
	began := false // before: that changes nothing but by the stubs
	for _, s := range all {
		if s.random && w.random == nil || !s.random && w.clock == nil || aux[auxVDSO] == 0 {
			continue
		}
		at := aux[auxVDSO] + s.offset
		is := make([]byte, len(s.after))
		switch {
		case m.read(at, is) && bytes.Equal(is, s.after):
			began = true
		case !bytes.Equal(is, s.before):
			return errors.New("its vDSO is none that this kernel has made")
		case !m.write(at, s.after):
			return errors.New("its vDSO cannot be overwritten")
		}
	}
	if w.random == nil || began {
		return nil
	}
	process, _ := lineage(n.PID)
	var seed [16]byte
	_, _ = w.random.begin(process).Read(seed[:]) // which never fails
	if at := aux[auxRandom]; at != 0 && !m.write(at, seed[:]) {
		return errors.New("its random bytes cannot be overwritten")
	}
	return nil
}
