// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
)

// command runs the program with arguments and returns what it prints to stdout, and its exit code.
func command(t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	var stdout, stderr strings.Builder
	root := rootCommand()
	root.SetOut(&stdout)
	root.SetErr(&stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(t.Context())
	var e *exit.Error
	switch {
	case err == nil:
	case errors.As(err, &e):
		code = e.Code
	default:
		code = exit.Usage
	}
	t.Logf("%q: exit code %d, %v\n%s", args, code, err, stderr.String())
	return stdout.String(), code
}

// blobServer serves a store in memory and returns its address.
func blobServer(t *testing.T) string {
	t.Helper()
	return grpctest.Serve(t, func(s *grpc.Server) {
		casserver.Register(s, casserver.Config{Instances: castest.Instances()})
	}, casserver.ServerOptions(nil)...)
}

func TestBlobs(t *testing.T) {
	one, two := blobServer(t), blobServer(t)
	pid := filepath.Join(t.TempDir(), "pid")
	must.Succeed(t, os.WriteFile(pid, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600))
	out, code := command(t, "blobs", "--executor", "ours=grpc://"+one+"/main", "--against", "theirs="+two,
		"--watch", "theirs="+pid, "--blobs", "50", "--large", "200KiB", "-c", "2", "--rounds", "2")
	must.Be(t, code == 0, "got exit code %d, want 0", code)
	for _, want := range []string{
		"50 blobs of 1.0 KiB, large 200.0 KiB, 2 calls in flight, medians of 2 rounds\n",
		"ours", "theirs", "find missing", "peak memory",
	} {
		expect.Text(t, out, want)
	}
}

func TestExitCodes(t *testing.T) {
	const closed = "127.0.0.1:1"
	address := blobServer(t)
	file := filepath.Join(t.TempDir(), "pid")
	must.Succeed(t, os.WriteFile(file, []byte("not a number"), 0o600))
	for _, c := range []struct {
		name string
		args []string
		code int
	}{
		{"NoRounds", []string{"blobs", "--rounds", "0"}, exit.Usage},
		{"Address", []string{"blobs", "--executor", "http://x"}, exit.Usage},
		{"AgainstWithoutName", []string{"blobs", "--executor", address, "--against", address}, exit.Usage},
		{"WatchUnknownServer", []string{"blobs", "--executor", address, "--watch", "other=" + file}, exit.Usage},
		{"WatchMalformedPIDFile", []string{"blobs", "--executor", address, "--watch", "executor=" + file}, exit.Environment},
		{"SettleWithoutWatch", []string{"blobs", "--executor", address, "--settle"}, exit.Usage},
		{"WatchAbsentPIDFile", []string{"blobs", "--executor", address, "--watch", "executor=" + file + "x"}, exit.Environment},
		{"ServerUnreachable", []string{"blobs", "--executor", closed}, exit.Unreachable},
		{"UnknownInstance", []string{"blobs", "--executor", "grpc://" + address + "/blobs"}, exit.Unreachable},
		{"NoActions", []string{"noop", "--actions", "0"}, exit.Usage},
		{"PlatformWithoutName", []string{"noop", "--platform", "linux"}, exit.Usage},
		{"NoLocalTime", []string{"noop", "--local-time", "0s"}, exit.Usage},
		{"TableWithoutRounds", []string{"table", "--rounds", "0"}, exit.Usage},
		{"CASOfUnknownServer", []string{"noop", "--executor", address, "--cas", "other=" + address}, exit.Usage},
		{"CASAddress", []string{"noop", "--executor", address, "--cas", "http://x"}, exit.Usage},
		{"CASUnreachable", []string{"noop", "--executor", address, "--cas", closed}, exit.Unreachable},
		{"NoExecution", []string{"noop", "--executor", address, "--actions", "1", "--local-time", "1ms"}, exit.No},
		{"UnknownInstanceByFlag", []string{"noop", "--executor", address, "--instance", "blobs"}, exit.Unreachable},
		{"InstanceInAddressWins", []string{
			"noop", "--executor", address + "/main", "--instance", "blobs", "--actions", "1", "--local-time", "1ms",
		}, exit.No},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, code := command(t, c.args...); code != c.code {
				t.Errorf("got exit code %d, want %d", code, c.code)
			}
		})
	}
}
