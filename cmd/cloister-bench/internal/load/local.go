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
	"slices"
	"strconv"
	"sync"
	"time"
)

// localWrites is how many commands write files at most, however much time there is: all that they write must be
// removed again.
const localWrites = 30

// measure has this machine do what the actions of a job do, without a server and without a sandbox, and adds what
// it took: as many at once as are in flight, but not more than there are processors.
func (l *Bare) measure(ctx context.Context, w *Work, j *job, c *ExecConfig) error {
	scratch, err := newScratch(j, c)
	if scratch != nil {
		defer os.RemoveAll(scratch.dir) // plain files of ours
	}
	if err != nil {
		return err
	}
	l.Parallel = min(w.Parallel, runtime.NumCPU())
	_, before := ownCPU()
	spawns, err := scratch.spawns(ctx, w, l.Parallel)
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

// A scratch is where the commands of a job run bare.
type scratch struct {
	dir  string
	job  *job
	time time.Duration // for which one thing is measured
}

// newScratch makes one, with the unchanged tree in it. The caller removes its directory.
func newScratch(j *job, c *ExecConfig) (*scratch, error) {
	dir, err := os.MkdirTemp(c.Dir, "cloister-bench-")
	if err != nil {
		return nil, err
	}
	s := &scratch{dir, j, c.LocalTime}
	return s, s.layOut("tree", func(data []byte, path, to string) error { return os.WriteFile(to, data, 0o444) })
}

// layOut makes a tree of the name in which every file is made by write; path is that of the file below the tree.
func (s *scratch) layOut(name string, write func(data []byte, path, to string) error) error {
	root := filepath.Join(s.dir, name)
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	for _, f := range s.job.base {
		if f.name == firstFile {
			if err := os.Mkdir(filepath.Join(root, f.dir), 0o755); err != nil {
				return err
			}
		}
		path := filepath.Join(f.dir, f.name)
		if err := write(f.blob.data, path, filepath.Join(root, path)); err != nil {
			return err
		}
	}
	return nil
}

// spawns starts the program that does nothing, and waits for it, over and over.
func (s *scratch) spawns(ctx context.Context, w *Work, parallel int) (*series, error) {
	env := s.job.actions[0].env
	return s.repeat(ctx, parallel, math.MaxInt, func(int) error {
		_, err := spawn([]string{w.Program}, env, "", false)
		return err
	})
}

// commands runs those of the actions, over and over, and checks what they print and write.
func (s *scratch) commands(ctx context.Context, w *Work, parallel int) (*series, error) {
	most := math.MaxInt
	switch w.Kind {
	case Outputs:
		most = localWrites
	case Mixed:
		most = 5 * localWrites // of which one in five writes
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
			if err := os.Mkdir(dir, 0o755); err != nil {
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

// checkFiles compares what c has written into dir.
func (c *command) checkFiles(dir string) error {
	for _, want := range []map[string]string{c.files, c.dir} {
		for path, digest := range want {
			data, err := os.ReadFile(filepath.Join(dir, path))
			if err != nil {
				return err
			}
			if hash(data) != digest {
				return fmt.Errorf("%s has digest %s, want %s", filepath.Join(dir, path), hash(data), digest)
			}
		}
	}
	return nil
}

// spawn runs a program to its end, and returns what it printed, if that is wanted. This is cheaper than package
// os/exec, and no cheaper way was found: neither syscall.ForkExec, nor a shell, nor several processes that do it.
func spawn(args, env []string, dir string, wanted bool) (stdout string, err error) {
	files := []*os.File{nil, nil, os.Stderr}
	var r *os.File
	if wanted {
		if r, files[1], err = os.Pipe(); err != nil {
			return "", err
		}
		defer r.Close()
	}
	p, err := os.StartProcess(args[0], args, &os.ProcAttr{Dir: dir, Env: env, Files: files})
	if wanted {
		files[1].Close()
	}
	if err != nil {
		return "", err
	}
	var printed []byte
	var readErr error
	if wanted {
		printed, readErr = io.ReadAll(r)
	}
	state, err := p.Wait()
	if err == nil && !state.Success() {
		err = fmt.Errorf("%q: %v", args, state)
	}
	return string(printed), errors.Join(err, readErr)
}

// A series is how long something took each time, and all together.
type series struct {
	took    []time.Duration
	elapsed time.Duration
}

// rate returns how often a second.
func (s *series) rate() float64 { return float64(len(s.took)) / s.elapsed.Seconds() }

// p50 returns the median, in milliseconds.
func (s *series) p50() float64 {
	return milliseconds(percentile(slices.Sorted(slices.Values(s.took)), 50))
}

// repeat calls f with 0, 1, ..., parallel of them at once, until the time is over, but at least once and no more
// than most times.
func (s *scratch) repeat(ctx context.Context, parallel, most int, f func(i int) error) (*series, error) {
	var mu sync.Mutex
	all := &series{}
	start := time.Now()
	err := each(ctx, parallel, most, func(_ context.Context, i int) error {
		began := time.Now()
		if i > 0 && began.Sub(start) > s.time {
			return errEnough
		}
		if err := f(i); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		all.took = append(all.took, time.Since(began))
		return nil
	})
	all.elapsed = time.Since(start)
	if err == errEnough {
		err = nil
	}
	return all, err
}

// errEnough ends repeat.
var errEnough = errors.New("time is over")

// RunLocal measures what this machine itself can do, without a server: it starts processes, runs the commands of trees
// that are read and of outputs, and lays out the tree by links and by copies. Of the works it takes what they consist of.
func RunLocal(ctx context.Context, c ExecConfig, tree, outputs *Work) (*LocalReport, error) {
	report := &LocalReport{Salt: c.Salt, Rounds: c.Rounds, Processors: runtime.NumCPU()}
	for round := range c.Rounds {
		if c.Progress != nil {
			c.Progress(round+1, tree)
		}
		for _, w := range []*Work{tree, outputs} {
			j, err := newJob(w, nil, fmt.Sprintf("%s/%d", c.Salt, round))
			if err != nil {
				return nil, err
			}
			if err := report.measure(ctx, w, j, &c); err != nil {
				return nil, err
			}
		}
	}
	return report, nil
}

// measure does for one work what RunLocal does.
func (r *LocalReport) measure(ctx context.Context, w *Work, j *job, c *ExecConfig) error {
	s, err := newScratch(j, c)
	if s != nil {
		defer os.RemoveAll(s.dir) // plain files of ours
	}
	if err != nil {
		return err
	}
	for _, parallel := range []int{1, runtime.NumCPU()} {
		at := fmt.Sprintf(", %d at a time", parallel)
		if w.Kind == Trees {
			spawns, err := s.spawns(ctx, w, parallel)
			if err != nil {
				return err
			}
			r.add("start "+w.Program+at, spawns)
		}
		commands, err := s.commands(ctx, w, parallel)
		if err != nil {
			return err
		}
		if w.Kind == Trees {
			r.add(fmt.Sprintf("read %d files%s", w.Tree.Files, at), commands)
		} else {
			r.add(fmt.Sprintf("write %d files%s", w.Files+w.Inner, at), commands)
		}
	}
	if w.Kind != Trees {
		return nil
	}
	for _, way := range []struct {
		name  string
		write func(data []byte, path, to string) error
	}{
		{"link", func(_ []byte, path, to string) error { return os.Link(filepath.Join(s.dir, "tree", path), to) }},
		{"copy", func(data []byte, _, to string) error { return os.WriteFile(to, data, 0o444) }},
	} {
		start := time.Now()
		if err := s.layOut(way.name, way.write); err != nil {
			return err
		}
		made := time.Now()
		if err := os.RemoveAll(filepath.Join(s.dir, way.name)); err != nil {
			return err
		}
		r.add(fmt.Sprintf("%s %d files", way.name, w.Tree.Files), once(made.Sub(start)))
		r.add(fmt.Sprintf("remove %d files of a %s", w.Tree.Files, way.name), once(time.Since(made)))
	}
	return nil
}

// once is the series of what was done once.
func once(took time.Duration) *series { return &series{[]time.Duration{took}, took} }
