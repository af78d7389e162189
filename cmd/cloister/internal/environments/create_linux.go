// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"golang.org/x/sys/unix"
)

// supervised is the variable that makes create the supervisor of the sandbox in a directory.
const supervised = "_CLOISTER_SANDBOX"

// Descriptors of a supervisor.
const (
	lockFD  = 3
	readyFD = 4
)

// A started is what a supervisor reports once.
type started struct {
	State *State
	Error string
	Code  int
}

// Create creates a sandbox and returns its state when it can execute commands. It starts this command line once more,
// as the supervisor, in which Create returns nil at the sandbox's end.
func Create(ctx context.Context, c *Config) (*State, error) {
	if dir := os.Getenv(supervised); dir != "" {
		return nil, c.report(ctx, dir)
	}
	dir, held, err := claim(c.Name)
	if err != nil {
		return nil, err
	}
	s, err := launch(ctx, dir, held)
	if err != nil {
		err = errors.Join(err, discard(dir))
	}
	held.Close()
	return s, err
}

// claim makes and locks the directory of a new sandbox. It is locked before it gets its name: a sweep could mistake an
// unlocked one for that of a killed supervisor.
func claim(name string) (dir string, held *os.File, err error) {
	all, err := Dir()
	if err != nil {
		return "", nil, err
	}
	if err := sweep(all); err != nil && unswept(filepath.Join(all, name)) {
		return "", nil, err
	}
	made, lock, err := move(all)
	if err != nil {
		return "", nil, exit.New(exit.Environment, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, localworker.RemoveAll(made), lock.Close())
		}
	}()
	random := name == ""
	for {
		if random {
			b := make([]byte, 4)
			_, _ = rand.Read(b) // it never fails
			name = hex.EncodeToString(b)
		}
		dir = filepath.Join(all, name)
		err := os.Rename(made, dir) // fails if dir exists, because it contains a lock
		switch {
		case err == nil:
			return dir, lock, nil
		case errors.Is(err, os.ErrExist) && random:
			continue
		case errors.Is(err, os.ErrExist):
			return "", nil, exit.New(exit.No, fmt.Errorf("sandbox %s exists: remove it with cloister sandbox rm %[1]s, or choose another --name", name))
		}
		return "", nil, exit.New(exit.Environment, err)
	}
}

// launch starts the supervisor, which inherits the lock, and waits until the sandbox can execute commands.
func launch(ctx context.Context, dir string, held *os.File) (*State, error) {
	r, w, err := os.Pipe()
	if err == nil {
		// Otherwise the supervisor would keep inherited descriptors open, such as a pipe that the caller reads to its end.
		err = unix.CloseRange(lockFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	}
	if err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("start the supervisor: %w", err))
	}
	defer r.Close()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/proc/self/exe")
	cmd.Args = os.Args
	cmd.Env = append(os.Environ(), supervised+"="+dir)
	cmd.ExtraFiles = []*os.File{held, w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("start the supervisor: %w", err))
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	var m started
	if err := json.NewDecoder(r).Decode(&m); err != nil {
		state := cmd.Wait()
		return nil, exit.New(exit.Internal, fmt.Errorf("the supervisor of the sandbox ended: %w", errors.Join(context.Cause(ctx), state)))
	}
	if m.Error != "" {
		_ = cmd.Wait() // the error says why
		return nil, exit.New(m.Code, errors.New(printableLines(m.Error)))
	}
	return m.State, nil
}

// report is the supervisor's part of Create.
func (c *Config) report(ctx context.Context, dir string) error {
	_ = os.Unsetenv(supervised) // cannot fail for a valid name
	syscall.CloseOnExec(lockFD) // a helper that outlives this process must not hold the lock
	syscall.CloseOnExec(readyFD)
	pipe := os.NewFile(readyFD, "ready")
	answered := false
	err := c.supervise(ctx, dir, func(s *State) error {
		if err := os.Chdir("/"); err != nil { // the creator's directory can be removed
			return err
		}
		answered = true
		return errors.Join(json.NewEncoder(pipe).Encode(started{State: s}), pipe.Close())
	})
	if answered || err == nil {
		return err
	}
	code := exit.Environment
	if e, ok := errors.AsType[*exit.Error](err); ok {
		code = e.Code
	}
	return json.NewEncoder(pipe).Encode(started{Error: err.Error(), Code: code})
}
