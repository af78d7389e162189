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

	"golang.org/x/sys/unix"
)

// The network of the tests is the test program's own: nobody else sees it, and it ends with the last process that is
// in it, however that ends.
//
//	the test, the head, Bazel          machine a            machine b
//	  loopback                           loopback             loopback
//	  farm 10.77.0.1 ---- a ------------ eth0 10.77.0.11
//	       (bridge)  `--- b --------------------------------- eth0 10.77.0.12
//
// Only descriptors of the test program hold the namespaces of machines in which no process is.
const headAddress = "10.77.0.1"

// entered marks the environment of a program that is in its own network.
const entered = "CLOISTER_TEST_OWN_NETWORK"

// enterNetwork starts the program anew in a network of its own, with a bridge; there it returns nil. The network is that of
// all threads, so that whatever a test starts is in it.
func enterNetwork() error {
	if os.Getenv(entered) != "" {
		os.Unsetenv(entered)
		return ip("link set dev lo up", "link add name farm type bridge", "addr add "+headAddress+"/24 dev farm", "link set dev farm up")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return errors.New("ip is not installed; fix: apt-get install iproute2")
	}
	runtime.LockOSThread() // until exec, which leaves this thread alone
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("a network namespace, which takes root: %w", err)
	}
	return fmt.Errorf("start the test program anew: %w", syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), entered+"=1")))
}

// ip has ip do what the lines say, in the network of the calling thread.
func ip(lines ...string) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip: %s: %w\n%s", strings.Join(lines, "; "), err, out)
	}
	return nil
}

// A machine is a network namespace with an address of its own, at a port of the bridge.
type machine struct {
	name, address string
	network       *os.File
}

// newMachine makes the machine number n, from 1 on, whose name is that of its port, too. It goes with the test.
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.network.Close() })
	const peer = "link add name %s type veth peer name eth0 netns /proc/%d/fd/%d"
	if err := ip(fmt.Sprintf(peer, name, os.Getpid(), m.network.Fd()), "link set dev "+name+" master farm up"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ip("link del dev " + name); err != nil {
			t.Error(err)
		}
	})
	err = m.inside(func() error {
		return ip("link set dev lo up", "addr add "+m.address+"/24 dev eth0", "link set dev eth0 up")
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// inside calls f on a thread that is in the network of m, and that ends afterwards. What f starts is there, too.
func (m *machine) inside(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(m.network.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network of %s: %w", m.name, err)
		}
		return f()
	})
}

// onThread calls f on a thread that ends afterwards.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: nobody else is to get this thread
		done <- f()
	}()
	return <-done
}

// unplug takes the machine off the bridge: to both sides the cable is in, and nothing comes through it.
func (m *machine) unplug(t *testing.T) {
	t.Helper()
	if err := ip("link set dev " + m.name + " nomaster"); err != nil {
		t.Fatal(err)
	}
}

// plug puts the machine on the bridge again.
func (m *machine) plug(t *testing.T) {
	t.Helper()
	if err := ip("link set dev " + m.name + " master farm"); err != nil {
		t.Fatal(err)
	}
}
