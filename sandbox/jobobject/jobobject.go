// SPDX-License-Identifier: Apache-2.0

// Package jobobject runs commands in job objects of Windows. It limits runs and leaves no process of them behind, but it
// does not confine them: a run reads and writes what the worker's user may, without that user's privileges and
// administrative group, reaches every network, and may open, change or end the process of the worker, which has the same
// user. Features.Gaps lists that, so only a Spec that accepts this backend by its name runs.
//
// Everything else that the backend does not enforce is refused, including the absence of a network that a Spec asks for
// by omitting loopback. A run sees the paths of this host: Targets of outputs and temporary directories in its working
// directory, in the values of its environment and in the path of its program are replaced by those. If an input has
// another size, mode or time after the run, the run is an error.
//
// It was tested under Wine 8 on Linux and has never been run on Windows. Wine does not enforce the limits of jobs.
package jobobject

// Name is the name of this backend in Features and of --sandbox.
const Name = "jobobject"
