// SPDX-License-Identifier: Apache-2.0

// Package program compiles cloister once for each package of end-to-end tests, when its first test needs it.
package program

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// A Program is the compiled cloister of one test package. Its zero value is ready for Main.
type Program struct {
	dir  string
	once sync.Once
	err  error
}

// Main runs the tests instead of m.Run and removes the program afterwards. TestMain passes its result to os.Exit.
// Without -parallel it runs more parallel tests than there are processors, because they mostly wait for the program.
func (p *Program) Main(m *testing.M) int {
	namespace.Init() // some tests use a sandbox of their own
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		_ = flag.Set("test.parallel", strconv.Itoa(4*runtime.GOMAXPROCS(0))) // fails only for a bad number
	}
	var err error
	if p.dir, err = os.MkdirTemp("", "cloister-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(p.dir) // contains only the program
	// Some tests run it as another user.
	if err := os.Chmod(p.dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Path returns the path of the program. It fails the test if the program does not compile.
func (p *Program) Path(t testing.TB) string {
	t.Helper()
	path := filepath.Join(p.dir, "cloister")
	p.once.Do(func() { p.err = bazelrun.BuildCloister(path) })
	if p.err != nil {
		t.Fatal(p.err)
	}
	return path
}

// Within returns the path of the program and a context that ends after limit or with the test. The time starts after
// compilation, which on a busy machine takes longer than any call.
func (p *Program) Within(t testing.TB, limit time.Duration) (ctx context.Context, path string) {
	t.Helper()
	path = p.Path(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx, path
}
