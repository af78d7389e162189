// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/grpctest"
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
	dir := t.TempDir()
	file, pid := filepath.Join(dir, "report.json"), filepath.Join(dir, "pid")
	if err := os.WriteFile(pid, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, code := command(t, "blobs",
		"--executor", "ours=grpc://"+one+"/main", "--against", "theirs="+two, "--watch", "theirs="+pid,
		"--blobs", "50", "--size", "1KiB", "--large", "200KiB", "--chunk", "64KiB", "-c", "2", "--lookups", "100", "--rounds", "2",
		"--salt", "s", "--verify", "--report", file)
	if code != 0 {
		t.Fatalf("got exit code %d, want 0", code)
	}
	for _, want := range []string{
		"50 blobs of 1.0 KiB, large 200.0 KiB in chunks of 64.0 KiB, 2 calls in flight, medians of 2 rounds, salt s\n",
		"ours", "theirs", "find missing", "peak memory",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("got output\n%s\nwant %q in it", out, want)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Servers []struct{ Name, Address string }
	}
	if err := json.Unmarshal(b, &report); err != nil || len(report.Servers) != 2 || report.Servers[1].Name != "theirs" {
		t.Errorf("got report %+v, %v, want two servers, the second named theirs", report, err)
	}
}

func TestExitCodes(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	address := blobServer(t)
	file := filepath.Join(t.TempDir(), "pid")
	if err := os.WriteFile(file, []byte("not a number"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		code int
	}{
		{"NoRounds", []string{"blobs", "--rounds", "0"}, exit.Usage},
		{"PercentOfDisk", []string{"blobs", "--size", "10%"}, exit.Usage},
		{"LargeSmallBlob", []string{"blobs", "--size", "2MiB"}, exit.Usage},
		{"EmptySmallBlob", []string{"blobs", "--size", "0"}, exit.Usage},
		{"LargeChunk", []string{"blobs", "--chunk", "4MiB"}, exit.Usage},
		{"Address", []string{"blobs", "--executor", "http://x"}, exit.Usage},
		{"AgainstWithoutName", []string{"blobs", "--executor", address, "--against", address}, exit.Usage},
		{"WatchUnknownServer", []string{"blobs", "--executor", address, "--watch", "other=" + file}, exit.Usage},
		{"WatchMalformedPIDFile", []string{"blobs", "--executor", address, "--watch", "executor=" + file}, exit.Environment},
		{"SettleWithoutWatch", []string{"blobs", "--executor", address, "--settle"}, exit.Usage},
		{"WatchAbsentPIDFile", []string{"blobs", "--executor", address, "--watch", "executor=" + file + "x"}, exit.Environment},
		{"ServerUnreachable", []string{"blobs", "--executor", closed}, exit.Unreachable},
		{"UnknownInstance", []string{"blobs", "--executor", "grpc://" + address + "/blobs"}, exit.Unreachable},
		{"NoActions", []string{"noop", "--actions", "0"}, exit.Usage},
		{"RelativeProgram", []string{"noop", "--program", "true"}, exit.Usage},
		{"NoOutputs", []string{"outputs", "--files", "0", "--in-directory", "0"}, exit.Usage},
		{"MoreDirectoriesThanFiles", []string{"tree", "--files", "5"}, exit.Usage},
		{"SizesReversed", []string{"tree", "--size", "2KiB..1KiB"}, exit.Usage},
		{"MalformedSize", []string{"mixed", "--size", "1KiB..x"}, exit.Usage},
		{"PlatformWithoutName", []string{"noop", "--platform", "linux"}, exit.Usage},
		{"NoLocalTime", []string{"local", "--local-time", "0s"}, exit.Usage},
		{"LocalWithoutRounds", []string{"local", "--rounds", "0"}, exit.Usage},
		{"TableWithoutRounds", []string{"table", "--rounds", "0"}, exit.Usage},
		{"CASOfUnknownServer", []string{"noop", "--executor", address, "--cas", "other=" + address}, exit.Usage},
		{"CASAddress", []string{"noop", "--executor", address, "--cas", "http://x"}, exit.Usage},
		{"CASUnreachable", []string{"noop", "--executor", address, "--cas", closed}, exit.Unreachable},
		{"NoExecution", []string{"noop", "--executor", address, "--actions", "1", "--local-time", "1ms"}, exit.No},
		{"UnknownInstanceByFlag", []string{"noop", "--executor", address, "--instance", "blobs"}, exit.Unreachable},
		{"InstanceInAddressWins", []string{
			"noop", "--executor", address + "/main", "--instance", "blobs", "--actions", "1", "--local-time", "1ms",
		}, exit.No},
		{"NoProgram", []string{"local", "--program", "/nonexistent", "--files", "10", "--dirs", "1"}, exit.Environment},
		{"StoreWithoutDir", []string{"store"}, exit.Usage},
		{"StoreWithoutBlobs", []string{"store", "--dir", t.TempDir(), "--blobs", "0"}, exit.Usage},
		{"StoreOfLargeBlobs", []string{"store", "--dir", t.TempDir(), "--size", "1MiB"}, exit.Usage},
		{"StoreInAFile", []string{"store", "--dir", file, "--blobs", "1"}, exit.No},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, code := command(t, c.args...); code != c.code {
				t.Errorf("got exit code %d, want %d", code, c.code)
			}
		})
	}
}

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	out, code := command(t, "store", "--dir", dir, "--blobs", "500", "--reads", "10")
	if code != 0 {
		t.Fatalf("got exit code %d, want 0", code)
	}
	for _, want := range []string{"put ", "opened   500 blobs in ", " bytes of heap per blob", "read "} {
		if !strings.Contains(out, want) {
			t.Errorf("got output\n%s\nwant %q in it", out, want)
		}
	}
	if _, code := command(t, "store", "--dir", dir, "--blobs", "500", "--salt", "other"); code != exit.No {
		t.Errorf("with other blobs: got exit code %d, want %d", code, exit.No)
	}
}
