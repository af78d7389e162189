// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"cmp"
	"fmt"
	"io"
	"os"

	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"golang.org/x/sys/unix"
)

// bridge carries all ports between the driver of msb and the guest: it forwards what is read from each end to the other
// side of a wire, and what arrives there to the ends, until either fails. It closes the ends. It does not close the wire,
// which may block it: that is up to the caller.
func bridge(in io.Reader, out io.Writer, ends []*os.File) error {
	w := wire.New(out)
	failed := make(chan error, 2*len(ends)+1)
	var opened []*wire.Port
	for i := range ends {
		opened = append(opened, w.Open(uint64(i)))
	}
	for i, p := range opened {
		fail := func(err error) { failed <- fmt.Errorf("port %d: %w", i, cmp.Or(err, io.EOF)) }
		go func() {
			_, err := io.Copy(p, ends[i])
			fail(err)
		}()
		go func() { fail(p.Deliver(ends[i])) }()
	}
	go func() { failed <- fmt.Errorf("the other side has ended: %w", w.Serve(in, nil)) }()
	err := <-failed
	for i, p := range opened {
		ends[i].Close()
		p.Close()
	}
	return err
}

// socketPair returns two connected sockets. Closing one ends its reads and those of the other.
func socketPair(name string) (a, b *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return os.NewFile(uintptr(pair[0]), name), os.NewFile(uintptr(pair[1]), name), nil
}
