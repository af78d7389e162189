// SPDX-License-Identifier: Apache-2.0

// Command sidebyside starts cloister serve (with and without --sync), bazel-remote and bb_storage on one disk, each
// with an empty store, and compares them with cloister-bench blobs, which must be in the directory of cloister. Further
// arguments are passed to cloister-bench blobs.
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
	"strconv"

	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

func main() {
	program := flag.String("cloister", "", "cloister binary (default: compiled from this working copy)")
	dir := flag.String("dir", "", "directory on the disk to use (default: the temporary directory)")
	size := flag.Int64("size", 10, "size of each store in GiB")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := sideBySide(ctx, *program, *dir, *size<<30, flag.Args(), os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "sidebyside:", err)
		os.Exit(1)
	}
}

// sideBySide starts the servers, runs cloister-bench blobs with further flags, and stops the servers.
func sideBySide(ctx context.Context, program, parent string, size int64, flags []string, out, info io.Writer) (err error) {
	if program == "" {
		if program, err = peers.BuildCloister(ctx); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(parent, "sidebyside-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	store := func(name string) (string, error) {
		store := filepath.Join(dir, "stores", name)
		return store, os.MkdirAll(store, 0o700)
	}
	bench := []string{"blobs"}
	add := func(flag, name, addr string, pid int) error {
		file := filepath.Join(dir, name+".pid")
		bench = append(bench, flag, name+"="+addr, "--watch", name+"="+file)
		return os.WriteFile(file, []byte(strconv.Itoa(pid)), 0o600)
	}

	for _, own := range []struct {
		name, flag string
		args       []string
	}{
		{"cloister", "--executor", nil},
		{"cloister-sync", "--against", []string{"--sync"}},
	} {
		ours, err := store(own.name)
		if err != nil {
			return err
		}
		server, err := bazelrun.StartServer(ctx, bazelrun.ServerConfig{
			Binary: program, Dir: ours, Home: dir, Listen: "127.0.0.1:0", MaxSize: strconv.FormatInt(size, 10), Args: own.args,
		})
		if err != nil {
			return err
		}
		stop := server.Stop
		defer func() { err = errors.Join(err, stop()) }()
		if err := add(own.flag, own.name, server.Addr, server.PID); err != nil {
			return err
		}
	}
	var running []*peers.Server
	defer func() {
		for _, peer := range running {
			err = errors.Join(err, peer.Stop())
		}
	}()
	for _, k := range peers.Kinds() {
		theirs, err := store(k.Name)
		if err != nil {
			return err
		}
		built, err := k.Build(ctx)
		if err != nil {
			return err
		}
		peer, err := k.Start(ctx, peers.Options{Program: built, Dir: theirs, Size: size})
		if err != nil {
			return err
		}
		running = append(running, peer)
		if err := add("--against", k.Name, peer.Addr, peer.PID); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(program), "cloister-bench"), append(bench, flags...)...)
	cmd.Stdout, cmd.Stderr = out, info
	return cmd.Run()
}
