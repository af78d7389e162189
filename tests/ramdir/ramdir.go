// SPDX-License-Identifier: Apache-2.0

// Package ramdir keeps the files of tests in memory. It is for packages that sync thousands of small files, which on a
// disk takes most of their time. Their programs run on a disk in the tests below tests.
package ramdir

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"
)

// Main runs the tests instead of m.Run, with their temporary directories in memory if TMPDIR is not set and /dev/shm
// has space. Benchmarks stay on the disk. TestMain passes its result to os.Exit.
func Main(m *testing.M) int {
	flag.Parse()
	benchmarks := flag.Lookup("test.bench").Value.String() != ""
	if benchmarks || os.Getenv("TMPDIR") != "" || !available() {
		return m.Run()
	}
	dir, held, err := create(shm)
	if err != nil {
		return m.Run()
	}
	defer held.Close()
	defer os.RemoveAll(dir) // tests that fail may have left something
	// Some tests run programs as another user.
	if err := errors.Join(os.Chmod(dir, 0o755), os.Setenv("TMPDIR", dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

const (
	shm    = "/dev/shm"
	prefix = "cloister-tests-"
)
