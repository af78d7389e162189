// SPDX-License-Identifier: Apache-2.0

// Package peers builds and starts the real servers of others with which Cloister works together, on loopback
// and each in a directory of the caller's, and builds clients of others. Only how they are started is here; their
// programs are compiled from the modules in the directories beside, and nothing of theirs is in this repository.
package peers

import (
	"path/filepath"
	"strconv"
)

// A Kind is one server of others.
type Kind struct {
	Name string
	dir  string // of its module, in that of this package
	pkg  string // its main package; what is in no module of theirs is in ours, below dir
	// generated are files that its sources embed and only its own build tool makes.
	generated []file
	args      func(o Options, listen string) []string
	config    func(o Options, listen string) any // becomes the file configName in its directory, as JSON
}

// configName is relative to the directory that a peer runs in.
const configName = "config.json"

// A file is one in the sources of a module.
type file struct{ module, name string }

// stylesheet is what all of Buildbarn embeds.
var stylesheet = []file{{"github.com/buildbarn/bb-storage", "pkg/otel/stylesheet.css"}}

// Options say how to start a peer.
type Options struct {
	Program string // what Build returned
	Dir     string // an existing directory for what it stores
	Size    int64  // bytes that it may store; 0: 1 GiB
	// Results has it answer with a result whether or not the blobs of it are present.
	Results bool

	Listen    string   // HOST:PORT; empty: a port of loopback that is free
	Metrics   string   // HOST:PORT of a scheduler's metrics, at /metrics; empty: nowhere
	Store     string   // HOST:PORT of the store, for a scheduler and a worker
	Scheduler string   // HOST:PORT, for a worker
	Runner    string   // unix:PATH or HOST:PORT, for a worker
	Build     string   // existing directory in which a worker lays out actions, and its runner finds them
	Args      []string // more flags
}

// BazelRemote is bazel-remote: a file for each blob, compressed.
var BazelRemote = Kind{
	Name: "bazel-remote", dir: "bazelremote", pkg: "github.com/buchgr/bazel-remote/v2",
	args: func(o Options, listen string) []string {
		// The name of a socket is short, so that this one is relative to the directory that it runs in.
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

// BBStorage is the storage of Buildbarn: blobs in one file that is used as a block device.
var BBStorage = Kind{
	Name: "bb_storage", dir: "bbstorage", pkg: ".",
	generated: stylesheet,
	args: func(o Options, listen string) []string {
		return []string{"-dir", o.Dir, "-size", strconv.FormatInt(o.Size, 10), "-listen", listen, "-complete=" + strconv.FormatBool(!o.Results)}
	},
}

// RemoteTool is the client of remote-apis-sdks for the command line. It is built, and not started as a server.
var RemoteTool = Kind{
	Name: "remotetool", dir: "remotetool", pkg: "github.com/bazelbuild/remote-apis-sdks/go/cmd/remotetool",
}

// BBScheduler is the queue of Buildbarn: Execution for clients, OperationQueue for workers, BuildQueueState for
// operators. It passes on to its Store what clients ask of blobs and results, so that they have one address. Its
// times and a queue with size classes are Args; its flag -h lists them.
var BBScheduler = Kind{
	Name: "bb_scheduler", dir: "bbremote", pkg: "./bbscheduler", generated: stylesheet,
	args: func(o Options, listen string) []string {
		return append([]string{"-listen", listen, "-store", o.Store, "-metrics", o.Metrics}, o.Args...)
	},
}

// BBWorker is a worker of Buildbarn, which lays out the input roots of actions in Build and has Runner run their
// commands. Identity, platform and the number of threads are Args; its flag -h lists them. It listens for those who
// ask for its metrics. When told to end it finishes what it executes, and waits for a scheduler that does not answer
// for a minute: end it before that.
var BBWorker = Kind{
	Name: "bb_worker", dir: "bbremote", pkg: "./bbworker", generated: stylesheet,
	args: func(o Options, listen string) []string {
		return append([]string{
			"-listen", listen, "-scheduler", o.Scheduler, "-store", o.Store, "-runner", o.Runner,
			"-build", o.Build, "-cache", filepath.Join(o.Dir, "cache"),
		}, o.Args...)
	},
}

// RunnerSocket is where in its Dir a BBRunner serves workers.
const RunnerSocket = "runner"

// BBRunner is the runner of Buildbarn, for a worker that has the same Build: a process of its own that runs commands,
// and confines nothing. It listens for those who ask for its metrics.
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

// BBDescriptors prints a FileDescriptorSet of the protocols of Buildbarn that Cloister speaks too. It is built, and
// not started as a server.
var BBDescriptors = Kind{Name: "bb_descriptors", dir: "bbremote", pkg: "./descriptors"}

// BBState calls a method of a scheduler's BuildQueueState: its arguments are HOST:PORT, the method, and a request in
// JSON. It is built, and not started as a server.
var BBState = Kind{Name: "bb_state", dir: "bbremote", pkg: "./bbstate", generated: stylesheet}

// Kinds are all servers that are stores.
func Kinds() []Kind { return []Kind{BazelRemote, BBStorage} }
