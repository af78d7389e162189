// SPDX-License-Identifier: Apache-2.0

// Package environment runs many commands in one sandbox. The sandbox is one run of a sandbox.Backend, whose command is
// an agent; the agent starts the commands. They share files, processes, loopback and limits of that run, and what one
// leaves behind, a file or a process in the background, is there for the next. Nothing separates them from each other:
// commands can forge the exit codes of others.
//
// The agent is the program itself, which calls namespace.Init first in main or imports package earlyinit. A Spec has it
// as an input with the file name Program.
package environment

import (
	"errors"

	"github.com/cloister-build/cloister/sandbox/internal/agent"
)

// Program is the file name that the agent's program must have in the sandbox.
const Program = agent.Program

// Args returns the command line of the run of an environment, in which the agent's program is in dir.
func Args(dir string) []string { return []string{dir + "/" + Program, agent.Serve} }

// ErrEnded means that an environment has ended, and its commands with it.
var ErrEnded = errors.New("the environment has ended")
