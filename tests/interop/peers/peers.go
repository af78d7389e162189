// SPDX-License-Identifier: Apache-2.0

// Package peers builds and starts servers of other projects, on loopback and in directories of the caller, and builds
// their clients. The programs are compiled from the modules in the subdirectories; this repository holds only their
// configuration.
package peers

import (
	"path/filepath"
	"strconv"
)

// A Kind is a server or client of another project.
type Kind struct {
	Name string
	dir  string // directory of its module below this package
	pkg  string // main package, theirs or one below dir
	// generated are files that its sources embed and that only its own build tool creates.
	generated []file
	args      func(o Options, listen string) []string
	config    func(o Options, listen string) any // content of the file configName, as JSON
}

// configName is relative to the peer's working directory.
const configName = "config.json"

// A file is one in the sources of a module.
type file struct{ module, name string }

// stylesheet is embedded by all Buildbarn programs.
var stylesheet = []file{{"github.com/buildbarn/bb-storage", "pkg/otel/stylesheet.css"}}

// Options configure a peer.
type Options struct {
	Program string // what Build returned
	Dir     string // existing directory for its store
	Size    int64  // bytes of its store; 0: 1 GiB
	// ReadOnly makes an S3 server refuse to write.
	ReadOnly bool
	// Results makes it serve results without checking that their blobs are present.
	Results bool

	Listen    string   // HOST:PORT; empty: a free port on loopback
	Metrics   string   // HOST:PORT of a scheduler's /metrics; empty: none
	Store     string   // HOST:PORT of the store, for a scheduler and a worker
	Scheduler string   // HOST:PORT, for a worker
	Runner    string   // unix:PATH or HOST:PORT, for a worker
	Build     string   // existing directory shared by a worker and its runner
	Args      []string // further flags
}

// BazelRemote is bazel-remote, which stores each blob in a compressed file.
var BazelRemote = Kind{
	Name: "bazel-remote", dir: "bazelremote", pkg: "github.com/buchgr/bazel-remote/v2",
	args: func(o Options, listen string) []string {
		// Socket names are short, so this one is relative to the working directory.
		args := []string{
			"--dir", filepath.Join(o.Dir, "store"), "--max_size", strconv.FormatInt((o.Size+1<<30-1)>>30, 10),
			"--grpc_address", listen, "--http_address", "unix://http", "--access_log_level", "none",
		}
		if o.Results {
			args = append(args, "--disable_grpc_ac_deps_check")
		}
		return args
	},
}

// BBStorage is Buildbarn's storage, with blobs in a file that serves as a block device. With -shards in Args, others of
// its kind hold the blobs.
var BBStorage = Kind{
	Name: "bb_storage", dir: "bbstorage", pkg: ".",
	generated: stylesheet,
	args: func(o Options, listen string) []string {
		return append([]string{
			"-dir", o.Dir, "-size", strconv.FormatInt(o.Size, 10), "-listen", listen, "-complete=" + strconv.FormatBool(!o.Results),
		}, o.Args...)
	},
}

// RemoteTool is the command-line client of remote-apis-sdks.
var RemoteTool = Kind{
	Name: "remotetool", dir: "remotetool", pkg: "github.com/bazelbuild/remote-apis-sdks/go/cmd/remotetool",
}

// BBScheduler is Buildbarn's scheduler: Execution for clients, OperationQueue for workers, BuildQueueState for
// operators. It forwards calls for blobs and results to its Store, so that clients need one address. Args set its
// timeouts and size classes; -h lists them.
var BBScheduler = Kind{
	Name: "bb_scheduler", dir: "bbremote", pkg: "./bbscheduler", generated: stylesheet,
	args: func(o Options, listen string) []string {
		return append([]string{"-listen", listen, "-store", o.Store, "-metrics", o.Metrics}, o.Args...)
	},
}

// BBWorker is Buildbarn's worker, which stages input roots in Build and runs commands with Runner. Args set its
// identity, platform and threads; -h lists them. Listen is the address of its metrics. On SIGTERM it finishes its
// actions and waits up to a minute for the scheduler, so stop it before the scheduler.
var BBWorker = Kind{
	Name: "bb_worker", dir: "bbremote", pkg: "./bbworker", generated: stylesheet,
	args: func(o Options, listen string) []string {
		return append([]string{
			"-listen", listen, "-scheduler", o.Scheduler, "-store", o.Store, "-runner", o.Runner,
			"-build", o.Build, "-cache", filepath.Join(o.Dir, "cache"),
		}, o.Args...)
	},
}

// RunnerSocket is the socket of a BBRunner, relative to its Dir.
const RunnerSocket = "runner"

// BBRunner is Buildbarn's runner, for a worker with the same Build. It runs commands without a sandbox. Listen is the
// address of its metrics.
var BBRunner = Kind{
	Name: "bb_runner", dir: "bbremote", pkg: "github.com/buildbarn/bb-remote-execution/cmd/bb_runner", generated: stylesheet,
	args: func(Options, string) []string { return []string{configName} },
	config: func(o Options, listen string) any {
		type object = map[string]any
		everybody := object{"allow": object{}}
		return object{
			"buildDirectoryPath": o.Build,
			"grpcServers":        []any{object{"listenPaths": []string{RunnerSocket}, "authenticationPolicy": everybody}},
			"global": object{"diagnosticsHttpServer": object{
				"httpServers":      []any{object{"listenAddresses": []string{listen}, "authenticationPolicy": everybody}},
				"enablePrometheus": true,
			}},
			"setTmpdirEnvironmentVariable": true,
		}
	},
}

// BBDescriptors is a command that prints a FileDescriptorSet of the Buildbarn protocols that Cloister implements.
var BBDescriptors = Kind{Name: "bb_descriptors", dir: "bbremote", pkg: "./descriptors"}

// BBState is a command that calls a method of a scheduler's BuildQueueState: its arguments are HOST:PORT, the method
// and a JSON request.
var BBState = Kind{Name: "bb_state", dir: "bbremote", pkg: "./bbstate", generated: stylesheet}

// Credentials of a VersityGW for its buckets.
const (
	AccessKey = "interop"
	SecretKey = "interop-secret"
)

// VersityGW is an S3 server with a directory below its Dir for each bucket and a file for each object. Args follow
// those of its command posix.
var VersityGW = Kind{
	Name: "versitygw", dir: "versitygw", pkg: "github.com/versity/versitygw/cmd/versitygw",
	args: func(o Options, listen string) []string {
		args := []string{"--port", listen, "--access", AccessKey, "--secret", SecretKey, "--quiet", "--keep-alive"}
		if o.ReadOnly {
			args = append(args, "--readonly")
		}
		return append(append(args, "posix"), append(o.Args, o.Dir)...)
	},
}

// Kinds returns the peers that are stores.
func Kinds() []Kind { return []Kind{BazelRemote, BBStorage} }
