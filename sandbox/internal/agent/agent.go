// SPDX-License-Identifier: Apache-2.0

// Package agent is the process in a long-lived environment that starts its commands. It is the command of the
// environment's run, so it has the confinement of that run, and whatever it starts inherits it.
//
// Its stdin is a Unix socket of packets. It receives Requests, those that start a command with the command's streams as
// descriptors, and sends Replies. Commands have the agent's user and could forge its replies, so its peer trusts these
// no more than the commands.
//
// Descriptors cannot be passed to another kernel. There, stdin and stdout of the agent are one side of a wire, which
// carries Requests, Replies and the streams. The other side is a Relay, which takes the place of the agent at the socket.
package agent

import "encoding/json"

// Program is the file name of the agent in the environment, by which the program knows what it is.
const Program = "cloister-environment"

// Serve is the agent's argument.
const Serve = "serve"

// A Request starts a command, sends a signal to its process group if Signal is not 0, or ends the agent.
type Request struct {
	ID     uint64
	Signal int `json:",omitempty"`
	// End ends the agent as the end of its socket does. It is used on a wire, which must carry the rest of the output.
	End bool `json:",omitempty"`

	Args []string `json:",omitempty"`
	// Env are variables in addition to those of the agent, or in place of them.
	Env []string `json:",omitempty"`
	// Dir is the working directory, "" for that of the agent.
	Dir string `json:",omitempty"`
	// Terminal means that the only descriptor is the command's controlling terminal, instead of three streams.
	Terminal bool `json:",omitempty"`
	// Joined means that stdout and stderr are one stream, whose two descriptors are copies.
	Joined bool `json:",omitempty"`
}

// port returns the number of the port of a command's stream on a wire: stdin is 0, stdout is 1, stderr is 2.
func port(id uint64, stream int) uint64 { return 3*id + uint64(stream) }

// A Reply without an ID reports that the agent is ready; its descriptor is a file that the agent has made, whose owner
// is the user of all commands. Others report that a command ended.
type Reply struct {
	ID   uint64
	Code int // the exit code, or 128+N after signal N
}

// Encode returns a packet.
func Encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // these types have no values that JSON lacks
	}
	return b
}
