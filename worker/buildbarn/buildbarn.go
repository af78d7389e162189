// SPDX-License-Identifier: Apache-2.0

// Package buildbarn speaks Buildbarn's protocol between a scheduler and its workers, OperationQueue.Synchronize, at both
// ends: a Server hands out the actions of a queue, and a Client takes actions from a scheduler of whatever make. It neither
// schedules nor executes: the one is the queue's business, the other an Executor's.
//
// It is the worker that calls, and each call says what it does:
//
//	worker                                   scheduler
//	idle                  --------------->   waits for an action, for a while
//	                      <---------------   executing A       take it
//	executing A, fetching --------------->
//	                      <---------------   (nothing)         carry on
//	executing A, running  --------------->
//	                      <---------------   idle              nobody wants A any more: kill it
//	executing A, completed -------------->   tells the client, waits for an action, for a while
//	                      <---------------   idle              call again
//
// A worker_id is one slot: there is one call at a time with it, and one action. Who is not heard of for a minute is lost,
// and so is the action that it had.
package buildbarn
