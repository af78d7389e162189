// SPDX-License-Identifier: Apache-2.0

// Command packaging builds a deb, an rpm, a container image as an OCI layout in a tarball, and a Helm chart. It needs
// neither root nor a daemon nor a network, and the same commit gives the same bytes. It publishes nothing.
//
// It is a separate module, so that its dependencies are not the program's.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b := build{root: filepath.Join("..", "..")}
	arch := flag.String("arch", runtime.GOARCH, "architectures, with commas between them: amd64, arm64")
	flag.StringVar(&b.out, "o", filepath.Join(b.root, "bin", "dist"), "directory to write to")
	flag.Parse()
	b.archs = strings.Split(*arch, ",")
	if err := b.all(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "packaging:", err)
		os.Exit(1)
	}
}

// A build is one set of packages. It runs in the directory of this program's sources.
type build struct {
	root  string // of the repository
	out   string
	archs []string

	version string
	time    time.Time // of everything in the packages
	made    []string
}

// all builds everything and prints the file names.
func (b *build) all(ctx context.Context) error {
	if err := b.identify(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return err
	}
	if err := b.writeCompletions(ctx); err != nil {
		return err
	}
	programs := map[string]string{}
	for _, arch := range b.archs {
		program := filepath.Join(b.out, "linux-"+arch, "cloister")
		if err := b.compile(ctx, arch, program); err != nil {
			return err
		}
		programs[arch] = program
		for _, format := range []string{"deb", "rpm"} {
			if err := b.pack(format, arch, program); err != nil {
				return fmt.Errorf("%s for %s: %w", format, arch, err)
			}
		}
	}
	if err := b.image(programs); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err := b.chart(filepath.Join("helm", "cloister")); err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	for _, name := range b.made {
		fmt.Println(name)
	}
	return nil
}

// release matches the version in the program's source.
var release = regexp.MustCompile(`(?m)^const Version = "([0-9]+\.[0-9]+\.[0-9]+)"$`)

// identify sets version and time. The time is SOURCE_DATE_EPOCH or the commit's, since the packing time would differ
// each time.
func (b *build) identify(ctx context.Context) error {
	name := filepath.Join(b.root, "cmd/cloister/internal/buildinfo/buildinfo.go")
	source, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	m := release.FindSubmatch(source)
	if m == nil {
		return fmt.Errorf("%s has no line like: const Version = \"1.2.3\"", name)
	}
	b.version = string(m[1])
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	if epoch == "" {
		out, err := exec.CommandContext(ctx, "git", "-C", b.root, "log", "-1", "--format=%ct").Output()
		if err != nil {
			return fmt.Errorf("read the commit time: %w; outside of a checkout, set SOURCE_DATE_EPOCH", err)
		}
		epoch = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH=%s: not a number of seconds since 1970", epoch)
	}
	b.time = time.Unix(seconds, 0).UTC()
	return nil
}

// compile builds the program for an architecture with the flags of the Makefile.
func (b *build) compile(ctx context.Context, arch, program string) error {
	abs, err := filepath.Abs(program)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", abs, "./cmd/cloister")
	cmd.Dir = b.root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile for %s: %w", arch, err)
	}
	return nil
}

// completions is the directory of the completion scripts, one per shell.
func (b *build) completions() string { return filepath.Join(b.out, "completions") }

// writeCompletions lets the program write its completion scripts, which are the same for every architecture.
func (b *build) writeCompletions(ctx context.Context) error {
	if err := os.MkdirAll(b.completions(), 0o755); err != nil {
		return err
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		cmd := exec.CommandContext(ctx, "go", "run", "-trimpath", "./cmd/cloister", "completion", shell)
		cmd.Dir = b.root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stderr = os.Stderr
		script, err := cmd.Output()
		if err == nil {
			err = os.WriteFile(filepath.Join(b.completions(), shell), script, 0o644)
		}
		if err != nil {
			return fmt.Errorf("completions for %s: %w", shell, err)
		}
	}
	return nil
}

// create returns a file to write to, and a function that gives it its name unless err is set.
func (b *build) create(name string) (f *os.File, done func(err error) error, err error) {
	path := filepath.Join(b.out, name)
	f, err = os.CreateTemp(b.out, "."+name+".*")
	if err != nil {
		return nil, nil, err
	}
	return f, func(err error) error {
		if err == nil {
			err = f.Chmod(0o644)
		}
		if closed := f.Close(); err == nil {
			err = closed
		}
		if err == nil {
			err = os.Rename(f.Name(), path)
		}
		if err != nil {
			os.Remove(f.Name())
			return err
		}
		b.made = append(b.made, path)
		return nil
	}, nil
}
