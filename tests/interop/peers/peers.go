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
}

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

	Listen  string   // HOST:PORT; empty: a port of loopback that is free
	Store   string   // HOST:PORT of the store, of a peer that has none
	Metrics string   // HOST:PORT of its metrics, at /metrics; empty: nowhere
	Args    []string // more flags
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

// Kinds are all servers that are stores.
func Kinds() []Kind { return []Kind{BazelRemote, BBStorage} }
