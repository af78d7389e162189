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

// Programs read the time, and newer ones random numbers, without entering the kernel: they call functions that the
// kernel maps into them (vdso(7)), invisible to filters. To answer these, the monitor replaces them with plain system
// calls when a program starts.

// A stub replaces a function of the vDSO.
type stub struct {
	random bool // for runs with their own random numbers, otherwise for those with their own clock
	offset uint64
	before []byte // expected bytes
	after  []byte
}

// Entries of the auxiliary vector (getauxval(3)).
const (
	auxRandom = 25 // AT_RANDOM: 16 random bytes
	auxVDSO   = 33 // AT_SYSINFO_EHDR: address of the vDSO
)

// CanAnswer returns nil if this host can replace the clock and random numbers of a run, and otherwise what is missing.
func CanAnswer() error {
	_, err := stubs()
	return err
}

// stubs are those of this kernel, whose vDSO is the same in every process.
var stubs = sync.OnceValues(func() ([]stub, error) {
	if len(stubCode) == 0 {
		return nil, errors.New("replacing clocks and random numbers is not supported on this architecture")
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
		return nil, nil // the vDSO is disabled: programs make system calls
	}
	// Some kernels protect read-only memory (proc_mem.force_override). This writes back what it reads.
	var head [16]byte
	if !own.read(at, head[:]) || !own.write(at, head[:]) {
		return nil, errors.New("the kernel does not allow writing to read-only memory of a process")
	}
	return findStubs(own.image(at))
})

// maxImage bounds the size of a vDSO, which has some pages.
const maxImage = 64 << 10

// image returns what is mapped at an address.
func (m memory) image(at uint64) []byte {
	var image []byte
	var page [pageSize]byte
	for len(image) < maxImage && m.read(at+uint64(len(image)), page[:]) {
		image = append(image, page[:]...)
	}
	return image
}

// findStubs returns where the functions of stubCode are in a vDSO.
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

// startProgram answers the first call of a program, before it can read the clock or random numbers.
func (w *session) startProgram(n *notification) {
	if err := w.patch(n); err != nil {
		w.cannotAnswer(n, err)
		return
	}
	w.queue.proceed(n.ID)
}

// patch writes the stubs into a program, and replaces the random bytes from the kernel.
func (w *session) patch(n *notification) error {
	all, err := stubs()
	if err != nil {
		return err
	}
	aux, err := auxiliary(fmt.Sprint(n.PID))
	if err != nil {
		return err
	}
	m, err := w.memory(n) // validates what was read before
	if err != nil {
		return err
	}
	defer m.close()
	began := false // the stubs are there already
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
			return errors.New("unexpected vDSO contents")
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
