// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// The times after which the demonstration gives up: as usual, and where every action is made again.
const (
	limit      = 175 * time.Second
	limitAgain = 30 * time.Minute
)

// A builder builds and tests the example through a server.
type builder interface {
	// Build builds and tests it, and counts.
	Build(ctx context.Context) (*count, error)
	// Clean forgets what was built, so that the next Build asks the server for everything.
	Clean(ctx context.Context) error
	// Close ends what the builder started.
	Close() error
}

// A count is how the actions of one build came about.
type count struct {
	executed, hits int
	wall           time.Duration
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	cloister := flags.String("cloister", "bin/cloister", "the `program` cloister")
	sdk := flags.Bool("sdk", false, "use the client of the SDK even if there is a Bazel")
	report := flags.String("repro", "", "instead, make all actions again after the first build, and write what differs to this `file`: .md, .json or .html")
	most := flags.Duration("limit", 0, "give up after this time (default: 2m55s, and with -repro 30m)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	if _, err := os.Stat("examples/unit.bzl"); err != nil {
		return fmt.Errorf("start it from the root of the repository: %w", err)
	}
	binary, err := filepath.Abs(*cloister)
	if err != nil {
		return err
	}

	// A second Ctrl-C ends the process at once, because the first gives the signal back.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	limit := limit
	if *report != "" {
		limit = limitAgain
	}
	if *most > 0 {
		limit = *most
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it takes longer than %v: where the machine is slow or busy, bin/demo -limit 15m gives it more", limit))
	defer cancel()

	dir, err := bazelrun.TempDir(nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bazelrun.Remove(dir)) }()
	home := filepath.Join(dir, "home")
	if err := os.Mkdir(home, 0o755); err != nil {
		return err
	}

	fmt.Fprintln(out, "serve: cloister with an empty cache")
	server, err := bazelrun.StartServer(ctx, bazelrun.ServerConfig{
		Binary: binary, Dir: filepath.Join(dir, "store"), Home: home, Listen: "127.0.0.1:0", Log: &indent{w: out},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()

	c, err := newBuilder(ctx, config{root: root, dir: dir, endpoint: server.Addr, sdk: *sdk, out: out})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()

	fmt.Fprintln(out, "first build: every action is executed in the sandbox")
	first, err := c.Build(ctx)
	if err != nil {
		return err
	}
	if *report != "" {
		fmt.Fprintf(out, "repro: each of %d actions is made three times, always under other conditions\n", first.executed)
		return judge(ctx, binary, server.Addr, *report, out)
	}
	fmt.Fprintln(out, "after clean: every action is found in the cache")
	if err := c.Clean(ctx); err != nil {
		return err
	}
	second, err := c.Build(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "sandbox: an action that tries what it must not do")
	tried, err := refusals(ctx, binary, root, server.Addr, out)
	if err != nil {
		return err
	}

	fmt.Fprintf(out, "\n%-12s %9s %9s %12s %9s\n", "", "actions", "executed", "cache hits", "wall")
	for _, row := range []struct {
		name string
		*count
	}{{"first build", first}, {"after clean", second}} {
		fmt.Fprintf(out, "%-12s %9d %9d %12d %8.1fs\n",
			row.name, row.executed+row.hits, row.executed, row.hits, row.wall.Seconds())
	}
	fmt.Fprintf(out, "%-12s %9d attempts, %d refused\n\n", "sandbox", tried, tried)
	if second.executed > 0 || second.hits != first.executed+first.hits {
		return fmt.Errorf("after clean %d actions were executed and %d were cache hits, want 0 and %d",
			second.executed, second.hits, first.executed+first.hits)
	}
	return nil
}

// A config is what a builder needs to know.
type config struct {
	root     string // the repository
	dir      string // a directory of the demonstration's own
	endpoint string // HOST:PORT of the server
	sdk      bool   // do not look for Bazel
	out      io.Writer
}

// newBuilder returns Bazel, or the client of the SDK where there is none.
func newBuilder(ctx context.Context, cfg config) (builder, error) {
	if cfg.sdk {
		return newSDK(ctx, cfg)
	}
	if err := bazelrun.Find(); err != nil {
		fmt.Fprintf(cfg.out, "client: %v\n", err)
		fmt.Fprintln(cfg.out, "client: instead, the client of the SDK builds and tests examples/text")
		return newSDK(ctx, cfg)
	}
	return &bazel{bazelrun.Bazel{
		Workspace: cfg.root, Root: filepath.Join(cfg.dir, "bazel"),
		Endpoint: cfg.endpoint, Log: &progress{w: cfg.out},
	}}, nil
}

// bazel is the client that most people have.
type bazel struct{ bazelrun.Bazel }

func (b *bazel) Build(ctx context.Context) (*count, error) {
	build, err := b.Run(ctx, "test", "//examples/...", "--jobs="+strconv.Itoa(4*runtime.NumCPU()))
	if err != nil {
		return nil, err
	}
	if build.ExitCode != 0 {
		return nil, fmt.Errorf("bazel test: exit %d\n%s", build.ExitCode, build.Output)
	}
	counts := build.Processes()
	return &count{executed: counts["remote"], hits: counts["remote cache hit"], wall: build.Wall}, nil
}

func (b *bazel) Close() error { return b.Shutdown() }

// attempts is a script for the sandbox. Each line is what is tried, in words and as a command; $1 is the
// port of the server outside, $2 the repository. It ends with 1 if any of it worked.
const attempts = `
attempt() {
	if why=$(eval "$2" 2>&1); then
		echo "$1: ALLOWED"
		status=1
	else
		echo "$1: ${why##*: }"
	fi
}
status=0
attempt "read the host's passwords" 'cat /etc/shadow'
attempt "read a source that is not declared" "cat '$2/examples/hostile/secret.txt'"
attempt "change an input" 'echo changed >> victim.txt'
attempt "change the compiler" 'echo changed >> /usr/bin/gcc'
attempt "connect to the server outside" "exec 3<> /dev/tcp/127.0.0.1/$1"
exit $status
`

// refusals runs attempts in the sandbox and shows what each led to, and then what the worker says of them. It
// returns how many there were, or an error if the sandbox did not refuse them all or nobody noticed.
func refusals(ctx context.Context, binary, root, addr string, out io.Writer) (int, error) {
	_, port, _ := strings.Cut(addr, ":")
	cmd := exec.CommandContext(ctx, binary, "run", "--in", filepath.Join(root, "examples/hostile"), "--",
		"/bin/bash", "-c", attempts, "attempts", port, root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var said, seen strings.Builder
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&said, &indent{w: out}), &seen
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("the sandbox did not refuse everything: %w\n%s", err, &seen)
	}
	if seen.Len() == 0 {
		return 0, errors.New("the worker did not notice what was tried")
	}
	fmt.Fprintln(out, "worker: what it saw of that")
	if _, err := io.WriteString(&indent{w: out}, seen.String()); err != nil {
		return 0, err
	}
	return strings.Count(said.String(), "\n"), nil
}

// An indent writes lines, each moved to the right.
type indent struct {
	w    io.Writer
	rest string // what came after the last end of line
}

func (i *indent) Write(p []byte) (int, error) {
	return len(p), eachLine(&i.rest, p, func(line string) error {
		_, err := fmt.Fprintf(i.w, "  %s\n", line)
		return err
	})
}

// A progress writes of Bazel's lines those that say how far it is.
type progress struct {
	w    io.Writer
	rest string // what came after the last end of line
}

func (b *progress) Write(p []byte) (int, error) {
	return len(p), eachLine(&b.rest, p, func(line string) error {
		if !strings.HasPrefix(line, "[") {
			return nil
		}
		_, err := fmt.Fprintf(b.w, "  %s\n", line)
		return err
	})
}

// eachLine calls f with each whole line of *rest followed by p, and leaves in *rest what is no line yet.
func eachLine(rest *string, p []byte, f func(line string) error) error {
	*rest += string(p)
	for {
		line, after, ok := strings.Cut(*rest, "\n")
		if !ok {
			return nil
		}
		*rest = after
		if err := f(line); err != nil {
			return err
		}
	}
}
