// SPDX-License-Identifier: Apache-2.0

// Package persistent speaks Bazel's worker protocol (https://bazel.build/remote/persistent) with a process that stays
// alive between requests, and keeps idle processes.
//
// A tool's command line ends in arguments that name flag files. Split separates these: what remains, with the argument
// --persistent_worker, starts the process, and each request carries the lines of its flag files. A Process handles one
// request at a time (singleplex), as delimited protocol buffers or as JSON. It cannot be used again after it exits,
// answers with anything other than one WorkResponse, or exceeds the timeout of a request.
//
// The package neither confines the process nor stages files. Its caller runs it in a sandbox, and between two requests
// replaces the files in the process's working directory.
package persistent

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// StartupArgument is the last argument of the process's command line.
const StartupArgument = "--persistent_worker"

// flagFile matches an argument that names a flag file, as Bazel does.
var flagFile = regexp.MustCompile(`^(?:@|--?flagfile=).+`)

// Split returns the arguments that start the process, without StartupArgument, and those that name flag files.
func Split(args []string) (startup, flags []string) {
	for i, a := range args {
		if i > 0 && flagFile.MatchString(a) {
			flags = append(flags, a)
		} else {
			startup = append(startup, a)
		}
	}
	return startup, flags
}

// Limits of the arguments of one request.
const (
	maxDepth     = 20
	maxArguments = 32 << 20 // bytes
)

// errArguments means that flag files are nested too deeply or too large.
var errArguments = errors.New("the flag files are nested too deeply or too large")

// Expand returns the arguments of a request: each @FILE is replaced by the lines of that file, which read returns. As
// in Bazel, @@x and @repository//label are arguments, and so is --flagfile=FILE, which the tool reads.
func Expand(flags []string, read func(name string) (string, error)) ([]string, error) {
	left := maxArguments
	var expand func(args []string, depth int) ([]string, error)
	expand = func(args []string, depth int) (all []string, err error) {
		for _, a := range args {
			name, ok := strings.CutPrefix(a, "@")
			if !ok || strings.HasPrefix(name, "@") || strings.Contains(name, "//") {
				if left -= len(a) + 1; left < 0 {
					return nil, errArguments
				}
				all = append(all, a)
				continue
			}
			if depth == maxDepth {
				return nil, errArguments
			}
			text, err := read(name)
			if err != nil {
				return nil, fmt.Errorf("flag file %+.256q: %w", name, err)
			}
			var lines []string
			for line := range strings.Lines(text) {
				lines = append(lines, strings.TrimRight(line, "\r\n"))
			}
			more, err := expand(lines, depth+1)
			if err != nil {
				return nil, err
			}
			all = append(all, more...)
		}
		return all, nil
	}
	return expand(flags, 0)
}

// A Request is a WorkRequest.
type Request struct {
	Arguments []string
	Inputs    []Input
}

// An Input is a file that a request may read, relative to the working directory.
type Input struct {
	Path   string
	Digest cas.Digest
}

// A Response is a WorkResponse.
type Response struct {
	ExitCode int32
	Output   string // what the tool prints for the user
}
