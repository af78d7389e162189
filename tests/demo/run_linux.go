// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
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

// The demo gives up after these times.
const (
	buildLimit = 175 * time.Second
	reproLimit = 30 * time.Minute
)

// A builder builds and tests the example through a server.
type builder interface {
	// Build builds and tests it and counts its actions.
	Build(ctx context.Context) (*count, error)
	// Clean removes the outputs, so that the next Build requests every action from the server.
	Clean(ctx context.Context) error
	// Close stops every process that the builder started.
	Close() error
}

// A count says how many actions of one build were executed and how many came from the cache.
type count struct {
	executed, hits int
	wall           time.Duration
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	cloister := flags.String("cloister", "bin/cloister", "the `program` cloister")
	sdk := flags.Bool("sdk", false, "use the SDK's client even if Bazel is installed")
	report := flags.String("repro", "", "re-run every action after the first build instead, and write the differences to this `file` (.md, .json or .html)")
	svg := flags.String("svg", "", "also write a recording of the output to this `file`")
	timeout := flags.Duration("limit", 0, "time limit (default 2m55s, with -repro 30m)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	if _, err := os.Stat("examples/unit.bzl"); err != nil {
		return fmt.Errorf("run it from the root of the repository: %w", err)
	}
	binary, err := filepath.Abs(*cloister)
	if err != nil {
		return err
	}

	// The first Ctrl-C restores the default action, so a second one kills the process.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	limit := cmp.Or(*timeout, buildLimit)
	if *report != "" {
		limit = cmp.Or(*timeout, reproLimit)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("not finished after %v; on a slow or busy machine run bin/demo -limit 15m", limit))
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

	if *svg != "" {
		r := newRecording(out)
		out = r
		defer func() {
			if err == nil {
				err = os.WriteFile(*svg, []byte(r.SVG("make demo")), 0o644)
			}
		}()
	}
	fmt.Fprintln(out, "serve: start cloister with an empty cache")
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

	fmt.Fprintln(out, "first build: execute every action in the sandbox")
	first, err := c.Build(ctx)
	if err != nil {
		return err
	}
	if *report != "" {
		fmt.Fprintf(out, "repro: run each of %d actions three times, each time under different conditions\n", first.executed)
		return checkRepro(ctx, binary, server.Addr, *report, out)
	}
	fmt.Fprintln(out, "after clean: find every action in the cache")
	if err := c.Clean(ctx); err != nil {
		return err
	}
	second, err := c.Build(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "sandbox: run one action that attempts forbidden things")
	attempted, err := refusals(ctx, binary, root, server.Addr, out)
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
	fmt.Fprintf(out, "%-12s %9d attempts, %d refused\n\n", "sandbox", attempted, attempted)
	if second.executed > 0 || second.hits != first.executed+first.hits {
		return fmt.Errorf("after clean %d actions were executed and %d were cache hits, want 0 and %d",
			second.executed, second.hits, first.executed+first.hits)
	}
	return nil
}

// A config configures a builder.
type config struct {
	root     string // the repository
	dir      string // private to the demo
	endpoint string // HOST:PORT of the server
	sdk      bool   // use the SDK's client even if Bazel is installed
	out      io.Writer
}

// newBuilder returns Bazel, or the SDK's client where Bazel is not installed.
func newBuilder(ctx context.Context, cfg config) (builder, error) {
	if cfg.sdk {
		return newSDK(ctx, cfg)
	}
	if err := bazelrun.Find(); err != nil {
		fmt.Fprintf(cfg.out, "client: %v\n", err)
		fmt.Fprintln(cfg.out, "client: use the SDK's client instead, which builds and tests examples/text")
		return newSDK(ctx, cfg)
	}
	return &bazel{bazelrun.Bazel{
		Workspace: cfg.root, Root: filepath.Join(cfg.dir, "bazel"),
		Endpoint: cfg.endpoint, Log: &progress{w: cfg.out},
	}}, nil
}

// bazel is a builder that runs a real Bazel.
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

// attempts is a script for the sandbox. Each line describes an attempt in words and as a command; $1 is the
// port of the server outside, $2 the repository. It exits with 1 if any attempt succeeds.
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

// refusals runs attempts in the sandbox and prints the result of each, then the violations that the worker reports. It
// returns the number of attempts, or an error if one succeeded or the worker reported none.
func refusals(ctx context.Context, binary, root, addr string, out io.Writer) (int, error) {
	_, port, _ := strings.Cut(addr, ":")
	cmd := exec.CommandContext(ctx, binary, "run", "--in", filepath.Join(root, "examples/hostile"), "--",
		"/bin/bash", "-c", attempts, "attempts", port, root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var results, violations strings.Builder
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&results, &indent{w: out}), &violations
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("an attempt succeeded: %w\n%s", err, &violations)
	}
	if violations.Len() == 0 {
		return 0, errors.New("the worker reported no violation")
	}
	fmt.Fprintln(out, "worker: violations it reported")
	if _, err := io.WriteString(&indent{w: out}, violations.String()); err != nil {
		return 0, err
	}
	return strings.Count(results.String(), "\n"), nil
}

// An indent indents each line by two spaces.
type indent struct {
	w    io.Writer
	rest string // the text after the last newline
}

func (i *indent) Write(p []byte) (int, error) {
	return len(p), eachLine(&i.rest, p, func(line string) error {
		_, err := fmt.Fprintf(i.w, "  %s\n", line)
		return err
	})
}

// A progress passes on only the lines in which Bazel reports its progress.
type progress struct {
	w    io.Writer
	rest string // the text after the last newline
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

// eachLine calls f for each complete line of *rest followed by p and leaves the incomplete last line in *rest.
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
