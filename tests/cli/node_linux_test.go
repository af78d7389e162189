// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// A node is a server or worker of a story.
type node struct {
	*bazelrun.Server // nil unless it runs
	config           bazelrun.ServerConfig
	drains           bool // may have ended by itself
}

// end stops the node and waits for its end.
func (n *node) end() error {
	server := n.Server
	n.Server = nil
	err := server.Stop()
	if n.drains && errors.Is(err, os.ErrProcessDone) {
		err = server.Wait()
	}
	return err
}

var workersAt = regexp.MustCompile(`(?m)^workers  cloister join grpcs?://(\S+)$`)

// serve starts a server. The flag -user=ID, which must be first, runs it as another user in a directory of that user;
// ordinary users run it as themselves. The flag -local, likewise, gives it an empty /usr/local of its own, -scan makes
// it scan its toolchain, -nojobs makes it execute nothing, and each -env=NAME=VALUE sets a variable.
func (s *story) serve(args []string) error {
	name := "server"
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		name, args = args[0], args[1:]
	}
	config := bazelrun.ServerConfig{
		Binary: built.Path(s), Dir: filepath.Join(s.work, name), Home: filepath.Join(s.work, "home"), Listen: "127.0.0.1:0",
	}
	if len(args) > 0 && strings.HasPrefix(args[0], "-user=") {
		if err := s.as(args[0][len("-user="):], &config); err != nil {
			return err
		}
		args = args[1:]
	}
	if len(args) > 0 && args[0] == "-local" {
		config.Binary = filepath.Join(s.work, "serve-with-local")
		script := fmt.Sprintf("#!/bin/sh\nexec unshare --mount --propagation private sh -c 'mount -t tmpfs none /usr/local && exec %s \"$@\"' sh \"$@\"\n",
			built.Path(s))
		if err := os.WriteFile(config.Binary, []byte(script), 0o755); err != nil {
			return err
		}
		args = args[1:]
	}
	config.Toolchain, args = toolchain(args)
	if len(args) > 0 && args[0] == "-nojobs" {
		config.Toolchain, config.NoJobs, args = "", true, args[1:]
	}
	for len(args) > 0 && strings.HasPrefix(args[0], "-env=") {
		config.Env, args = append(config.Env, args[0][len("-env="):]), args[1:]
	}
	config.Args = args
	if err := s.start(name, config); err != nil {
		return err
	}
	return s.use([]string{name})
}

// as makes a server run as another user.
func (s *story) as(id string, config *bazelrun.ServerConfig) error {
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return err
	}
	if os.Getuid() == 0 {
		config.User = &syscall.Credential{Uid: uint32(n), Gid: uint32(n)}
	}
	dir, err := bazelrun.TempDir(config.User)
	if err != nil {
		return err
	}
	s.Cleanup(func() {
		expect.Error(s, bazelrun.Remove(dir), nil)
	})
	program := filepath.Join(dir, "cloister")
	// Another process copies it: a child that is forked meanwhile would keep a descriptor of this one open for writing,
	// and nobody could execute the copy (ETXTBSY).
	if out, err := exec.Command("cp", config.Binary, program).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	config.Binary, config.Dir, config.Home = program, filepath.Join(dir, "another", "store"), dir
	if err := bazelrun.Confines(s.Context(), config.Binary, config.User); err != nil {
		sandboxtest.Unavailable(s, "unprivileged", err)
	}
	return nil
}

// declaredToolchain is the --toolchain of servers and workers whose stories do not test it.
const declaredToolchain = "cli"

// toolchain returns the --toolchain of a server or worker, and its flags without -scan. The toolchain is "" with -scan,
// with --worker-listen, since a head refuses the flag, and if the flags have one.
func toolchain(args []string) (id string, flags []string) {
	if len(args) > 0 && args[0] == "-scan" {
		return "", args[1:]
	}
	if slices.ContainsFunc(args, func(a string) bool { return a == "--worker-listen" || strings.HasPrefix(a, "--toolchain=") }) {
		return "", args
	}
	return declaredToolchain, args
}

// join starts a worker. The flag -scan, which must be first, makes it scan its toolchain.
func (s *story) join(args []string) error {
	name := args[0]
	toolchain, args := toolchain(args[1:])
	return s.start(name, bazelrun.ServerConfig{
		Binary: built.Path(s), Dir: filepath.Join(s.work, name), Home: filepath.Join(s.work, "home"), MaxSize: "1GiB",
		Env:  []string{"RUNSC_PATH=" + os.Getenv("RUNSC_PATH")},
		Join: s.script.Getenv("WORKERS"), Toolchain: toolchain, Args: append([]string{"--name", name, "--jobs", "2"}, args...),
	})
}

func (s *story) start(name string, config bazelrun.ServerConfig) error {
	confined(s)
	log, err := os.Create(filepath.Join(s.work, name+".log"))
	if err != nil {
		return err
	}
	s.Cleanup(func() { log.Close() })
	config.Log = log
	server, err := bazelrun.StartServer(s.Context(), config)
	s.nodes[name] = &node{server, config, false}
	return err
}

func (s *story) use(args []string) error {
	n := s.nodes[args[0]]
	for name, value := range map[string]string{
		"CAS": "grpc://" + n.Addr, "ADDR": n.Addr, "PID": strconv.Itoa(n.PID), "DIR": n.config.Dir,
	} {
		s.script.Setenv(name, value)
	}
	if m := workersAt.FindStringSubmatch(s.logged(args[0])); m != nil {
		s.script.Setenv("WORKERS", m[1])
	}
	return nil
}

func (s *story) end(args []string) error { return s.nodes[args[0]].end() }

func (s *story) drain(args []string) error {
	n := s.nodes[args[0]]
	n.drains = true
	return syscall.Kill(n.PID, syscall.SIGTERM)
}

func (s *story) crash(args []string) error {
	n := s.nodes[args[0]]
	n.Kill()
	n.Server = nil
	return nil
}

func (s *story) health(args []string) error {
	g := s.guest("")
	r, err := healthpb.NewHealthClient(g).Check(g.ctx, &healthpb.HealthCheckRequest{Service: strings.Join(args, "")})
	s.text = fmt.Sprintln(r.GetStatus())
	return err
}

func (s *story) bucket([]string) error {
	objects := s3mem.New()
	if err := objects.CreateBucket("farm-cache"); err != nil {
		return err
	}
	server := httptest.NewServer(gofakes3.New(objects).Server())
	s.Cleanup(server.Close)
	s.script.Setenv("BUCKET", "s3://farm-cache/stories?region=us-east-1&endpoint="+server.URL)
	return nil
}

// flip changes a byte of the newest copy of a small blob, which is text in a segment, and of a large blob's file.
func (s *story) flip(args []string) error {
	dir := s.script.Getenv("DIR")
	segments, err := filepath.Glob(filepath.Join(dir, "segments", "*.data"))
	if err != nil {
		return err
	}
	flipped := 0
	for _, path := range segments {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if at := bytes.LastIndex(b, []byte(args[0])); at >= 0 {
			flipped++
			if err := change(path, at); err != nil {
				return err
			}
		}
	}
	large := filepath.Join(dir, "files", "*", "sha256", "*", strings.Replace(args[1], "/", "-", 1))
	files, err := filepath.Glob(large)
	if err != nil || len(files) != 1 || flipped != 1 {
		return fmt.Errorf("got %d segments with %q and files %q, %v, want one of each", flipped, args[0], files, err)
	}
	return change(files[0], 77)
}

// change overwrites a byte of a file, which may be read-only.
func change(path string, at int) error {
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, os.ErrPermission) {
		if err = os.Chmod(path, 0o600); err == nil {
			w, err = os.OpenFile(path, os.O_WRONLY, 0)
		}
	}
	if err != nil {
		return err
	}
	_, err = w.WriteAt([]byte("X"), int64(at))
	return errors.Join(err, w.Close())
}
