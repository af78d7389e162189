// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// localWrites limits the number of commands that write files, which must all be removed at the end.
const localWrites = 30

// measure runs the commands of a job without server and sandbox, and adds the measurements to l. It runs as many
// commands at a time as actions are in flight, but at most one per processor.
func (l *LocalResult) measure(ctx context.Context, w *Workload, j *job, c *ExecConfig) error {
	scratch, err := newScratch(j, c)
	if scratch != nil {
		defer os.RemoveAll(scratch.dir) // contains only plain files
	}
	if err != nil {
		return err
	}
	l.Parallel = min(w.Parallel, runtime.NumCPU())
	_, before := ownCPU()
	spawns, err := scratch.spawns(ctx, l.Parallel)
	if err != nil {
		return err
	}
	all := spawns
	if !w.idle() {
		_, before = ownCPU()
		if all, err = scratch.commands(ctx, w, l.Parallel); err != nil {
			return err
		}
	}
	_, after := ownCPU()
	l.Spawns = append(l.Spawns, spawns.rate())
	l.Rates = append(l.Rates, all.rate())
	l.P50s = append(l.P50s, all.p50())
	l.CPUs = append(l.CPUs, milliseconds(after-before)/float64(len(all.took)))
	return nil
}

// A scratch is the directory in which the commands of a job run.
type scratch struct {
	dir  string
	job  *job
	time time.Duration // per measurement
}

// newScratch creates a scratch directory with the unchanged tree. The caller removes it, also after an error.
func newScratch(j *job, c *ExecConfig) (*scratch, error) {
	dir, err := os.MkdirTemp("", "cloister-bench-")
	if err != nil {
		return nil, err
	}
	s := &scratch{dir, j, c.LocalTime}
	for _, f := range j.base {
		path := filepath.Join(dir, "tree", f.dir, f.name)
		if f.name == firstFile {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return s, err
			}
		}
		if err := os.WriteFile(path, f.blob.data, 0o444); err != nil {
			return s, err
		}
	}
	return s, nil
}

// spawns repeatedly starts the program that does nothing and waits for it.
func (s *scratch) spawns(ctx context.Context, parallel int) (*series, error) {
	env := s.job.actions[0].env
	return s.repeat(ctx, parallel, math.MaxInt, func(int) error {
		_, err := spawn([]string{Program}, env, "", false)
		return err
	})
}

// commands repeatedly runs the actions' commands, and checks their outputs.
func (s *scratch) commands(ctx context.Context, w *Workload, parallel int) (*series, error) {
	most := math.MaxInt
	switch w.Kind {
	case Outputs, Compiles:
		most = localWrites
	case Mixed:
		most = 5 * localWrites // one in five writes
	}
	outs, err := os.MkdirTemp(s.dir, "out-")
	if err != nil {
		return nil, err
	}
	own := func(i int) string { return filepath.Join(outs, strconv.Itoa(i)) }
	all, err := s.repeat(ctx, parallel, most, func(i int) error {
		c := &s.action(i).local
		dir := ""
		switch {
		case c.writes():
			dir = own(i)
			if err := c.prepare(dir); err != nil {
				return err
			}
		case c.stdout != "":
			dir = filepath.Join(s.dir, "tree")
		}
		stdout, err := spawn(c.args, c.env, dir, c.stdout != "")
		if err == nil && stdout != c.stdout {
			err = fmt.Errorf("stdout of %q is %+.256q, want %+.256q", c.args, stdout, c.stdout)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	written, err := os.ReadDir(outs)
	if err != nil {
		return nil, err
	}
	for _, dir := range written {
		i, err := strconv.Atoi(dir.Name())
		if err == nil {
			err = s.action(i).local.checkFiles(own(i))
		}
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (s *scratch) action(i int) *action { return &s.job.actions[i%len(s.job.actions)] }

// writes reports whether c writes files.
func (c *command) writes() bool { return len(c.files)+len(c.dir) > 0 }

// prepare creates dir with the inputs of c.
func (c *command) prepare(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for _, f := range c.inputs {
		if err := os.WriteFile(filepath.Join(dir, f.name), f.blob.data, 0o444); err != nil {
			return err
		}
	}
	return nil
}

// checkFiles checks the outputs of c in dir.
func (c *command) checkFiles(dir string) error {
	for _, want := range []map[string]string{c.files, c.dir} {
		for path, digest := range want {
			data, err := os.ReadFile(filepath.Join(dir, path))
			if err != nil {
				return err
			}
			if digest != anyContent && hash(data) != digest {
				return fmt.Errorf("%s has digest %s, want %s", filepath.Join(dir, path), hash(data), digest)
			}
		}
	}
	return nil
}

// spawn runs a program to its end, and returns its output if capture is set. It is cheaper than os/exec. Neither
// syscall.ForkExec, a shell nor several parent processes are cheaper.
func spawn(args, env []string, dir string, capture bool) (stdout string, err error) {
	files := []*os.File{nil, nil, os.Stderr}
	var r *os.File
	if capture {
		if r, files[1], err = os.Pipe(); err != nil {
			return "", err
		}
		defer r.Close()
	}
	p, err := os.StartProcess(args[0], args, &os.ProcAttr{Dir: dir, Env: env, Files: files})
	if capture {
		files[1].Close()
	}
	if err != nil {
		return "", err
	}
	var printed []byte
	var readErr error
	if capture {
		printed, readErr = io.ReadAll(r)
	}
	state, err := p.Wait()
	if err == nil && !state.Success() {
		err = fmt.Errorf("%q: %v", args, state)
	}
	return string(printed), errors.Join(err, readErr)
}

// A series contains the durations of repetitions, and of all together.
type series struct {
	took    []float64 // milliseconds
	elapsed time.Duration
}

// rate returns the number of repetitions per second.
func (s *series) rate() float64 { return float64(len(s.took)) / s.elapsed.Seconds() }

// p50 returns the median in milliseconds.
func (s *series) p50() float64 {
	return percentile(s.took, 50)
}

// repeat calls f with 0, 1, ... for s.time, parallel calls at a time, but at least once and at most most times.
func (s *scratch) repeat(ctx context.Context, parallel, most int, f func(i int) error) (*series, error) {
	var mu sync.Mutex
	all := &series{}
	start := time.Now()
	err := each(ctx, parallel, most, func(_ context.Context, i int) error {
		began := time.Now()
		if i > 0 && began.Sub(start) > s.time {
			return errTimeUp
		}
		if err := f(i); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		all.took = append(all.took, milliseconds(time.Since(began)))
		return nil
	})
	all.elapsed = time.Since(start)
	if errors.Is(err, errTimeUp) {
		err = nil
	}
	return all, err
}

// errTimeUp ends repeat.
var errTimeUp = errors.New("time is up")
