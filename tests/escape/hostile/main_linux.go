// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// attacks are the subcommands. Each receives the arguments after its name.
var attacks = map[string]func(*report, []string){
	// files
	"input-write":    inputWrite,
	"input-metadata": inputMetadata,
	"input-name":     inputName,
	"input-tree":     inputTree,
	"input-copy":     inputCopy,
	"input-lease":    inputLease,
	"outside":        outside,
	"device":         device,
	"setuid":         setuid,
	"fill":           fill,
	"files":          files,
	"names":          names,
	"links":          links,
	"swap":           swap,
	// processes
	"userns":   userns,
	"mount":    mount,
	"setns":    setns,
	"ptrace":   ptrace,
	"init":     initProcess,
	"others":   others,
	"kill-all": killAll,
	"daemon":   daemon,
	"stubborn": stubborn,
	"core":     core,
	// network
	"connect":  connect,
	"public":   public,
	"abstract": abstract,
	"inbound":  inbound,
	"families": families,
	"route":    route,
	// between runs
	"leave":  leave,
	"find":   find,
	"victim": victim,
	"lock":   lock,
	"keys":   keys,
	// limits
	"forks":   forks,
	"memory":  memory,
	"sockets": sockets,
	"fds":     descriptors,
	"cpu":     cpu,
	"flood":   flood,
	// the kernel and the machine
	"absent":       absent,
	"syscalls":     systemCalls,
	"counters":     hostCounters,
	"foreign":      foreign,
	"mounts":       mounts,
	"identity":     identity,
	"capabilities": capabilities,
	// children of the above
	"child-sleep":  func(*report, []string) { sleep() },
	"child-linger": linger,
	"child-abort":  func(*report, []string) { abort() },
	"child-spin":   func(*report, []string) { spin() },
	"child-ids":    ids,
	"child-swap":   swapAgain,
	"child-mount":  mountHere,
}

func main() {
	r := &report{}
	if len(os.Args) < 2 || attacks[os.Args[1]] == nil {
		r.stop("unknown attack %q", slices.Clip(os.Args[1:]))
		r.exit()
	}
	attacks[os.Args[1]](r, os.Args[2:])
	r.exit()
}

// refusals are the errors with which a sandbox refuses. Any other error may be a bug in this program and proves
// nothing.
var refusals = []error{unix.EPERM, unix.EACCES, unix.EROFS, unix.ENOSYS, unix.EOVERFLOW}

// refused records an attempt that must fail with one of refusals or of also.
func (r *report) refused(what string, err error, also ...error) {
	is := func(target error) bool { return errors.Is(err, target) }
	switch {
	case err == nil:
		r.escape("%s succeeded", what)
	case slices.ContainsFunc(refusals, is) || slices.ContainsFunc(also, is):
		r.hold("%s: %s", what, errorName(err))
	default:
		r.stop("%s: %v", what, err)
	}
}

// must reports whether a precondition of an attack holds.
func (r *report) must(what string, err error) bool {
	if err != nil {
		r.stop("%s: %v", what, err)
	}
	return err == nil
}

func errorName(err error) string {
	if no, ok := errors.AsType[unix.Errno](err); ok {
		return unix.ErrnoName(no)
	}
	return err.Error()
}
