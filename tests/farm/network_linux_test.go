// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// The test program runs in its own network namespace, which ends with the last process in it.
//
//	the test, the head, Bazel          machine a            machine b
//	  loopback                           loopback             loopback
//	  farm 10.77.0.1 ---- a ------------ eth0 10.77.0.11
//	       (bridge)  `--- b --------------------------------- eth0 10.77.0.12
//
// Descriptors of the test program keep the namespaces of machines without a process.
const headAddress = "10.77.0.1"

// entered is the environment variable set in the program's own network namespace.
const entered = "CLOISTER_TEST_OWN_NETWORK"

// enterNetwork restarts the program in a new network namespace with a bridge, where it returns nil. All threads, and so
// all processes that a test starts, are in that namespace.
func enterNetwork() error {
	if os.Getenv(entered) != "" {
		os.Unsetenv(entered)
		return ip("link set dev lo up", "link add name farm type bridge", "addr add "+headAddress+"/24 dev farm", "link set dev farm up")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return errors.New("ip is not installed; fix: apt-get install iproute2")
	}
	runtime.LockOSThread() // until exec, which keeps this thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("a network namespace, which takes root: %w", err)
	}
	return fmt.Errorf("restart the test program: %w", syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), entered+"=1")))
}

// ip runs ip commands in the network namespace of the calling thread.
func ip(lines ...string) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %s: %w\n%s", strings.Join(lines, "; "), err, out)
	}
	return nil
}

// A machine is a network namespace with an address, connected to the bridge.
type machine struct {
	name, address string
	network       *os.File
}

// newMachine creates machine number n, from 1. Its name is also that of its port. It is removed with the test.
func newMachine(t *testing.T, name string, n int) *machine {
	t.Helper()
	m := &machine{name: name, address: fmt.Sprintf("10.77.0.%d", 10+n)}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("network namespace: %w", err)
		}
		var err error
		m.network, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	must.Succeed(t, err)
	t.Cleanup(func() { m.network.Close() })
	const peer = "link add name %s type veth peer name eth0 netns /proc/%d/fd/%d"
	must.Succeed(t, ip(fmt.Sprintf(peer, name, os.Getpid(), m.network.Fd()), "link set dev "+name+" master farm up"))
	t.Cleanup(func() { must.Succeed(t, ip("link del dev "+name)) })
	err = m.inside(func() error {
		return ip("link set dev lo up", "addr add "+m.address+"/24 dev eth0", "link set dev eth0 up")
	})
	must.Succeed(t, err)
	return m
}

// inside calls f on a new thread in the network namespace of m. Processes that f starts are in it, too.
func (m *machine) inside(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(m.network.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace of %s: %w", m.name, err)
		}
		return f()
	})
}

// onThread calls f on a thread that ends afterwards.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread is not reused
		done <- f()
	}()
	return <-done
}

// unplug disconnects the machine from the bridge. Both sides keep their link, but no packet passes.
func (m *machine) unplug(t *testing.T) {
	t.Helper()
	must.Succeed(t, ip("link set dev "+m.name+" nomaster"))
}

// plug reconnects the machine to the bridge.
func (m *machine) plug(t *testing.T) {
	t.Helper()
	must.Succeed(t, ip("link set dev "+m.name+" master farm"))
}
