// SPDX-License-Identifier: Apache-2.0

// Package buildbarn implements both ends of Buildbarn's protocol between a scheduler and its workers,
// OperationQueue.Synchronize: a Server assigns the actions of a queue, and a Client takes actions from any scheduler.
// It neither schedules nor executes: the queue and an Executor do.
//
// Workers call, and report in each call what they do:
//
//	worker                                   scheduler
//	idle                  --------------->   waits for an action, for a while
//	                      <---------------   executing A       take it
//	executing A, fetching --------------->
//	                      <---------------   (nothing)         carry on
//	executing A, running  --------------->
//	                      <---------------   idle              no client waits for A: kill it
//	executing A, completed -------------->   answers the client, waits for an action, for a while
//	                      <---------------   idle              call again
//
// A worker_id is one slot, with at most one call and one action at a time. A worker that does not call for a minute is
// lost, and so is its action.
package buildbarn
