// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// A request is what a client asks of a supervisor. It is followed by a byte for each signal.
type request struct {
	Verb     string   `json:"verb"` // exec or stop
	Args     []string `json:"args,omitempty"`
	Env      []string `json:"env,omitempty"`
	Dir      string   `json:"dir,omitempty"`
	Terminal bool     `json:"terminal,omitempty"`
	Session  bool     `json:"session,omitempty"`
}

// A reply ends a request.
type reply struct {
	Code  int    `json:"code"`            // of the command or, with an error, of the client
	Error string `json:"error,omitempty"` // why the command has no exit code
	Ended bool   `json:"ended,omitempty"` // the error is the sandbox's end
}

// maxMessage bounds a request, whose command the agent limits further.
const maxMessage = 1 << 20

// send writes a message with descriptors.
func send(conn *net.UnixConn, m any, fds ...int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	b = append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	n, _, err := conn.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) {
		_, err = conn.Write(b[n:])
	}
	return err
}

// receive reads a message and at most three descriptors.
func receive(conn *net.UnixConn, m any) ([]*os.File, error) {
	var size [4]byte
	rights := make([]byte, unix.CmsgSpace(3*4))
	n, oob, _, _, err := conn.ReadMsgUnix(size[:], rights)
	if err != nil {
		return nil, err
	}
	files, err := parse(rights[:oob])
	if err == nil {
		_, err = io.ReadFull(conn, size[n:])
	}
	length := binary.LittleEndian.Uint32(size[:])
	if err == nil && length > maxMessage {
		err = fmt.Errorf("message of %d bytes", length)
	}
	if err == nil {
		b := make([]byte, length)
		if _, err = io.ReadFull(conn, b); err == nil {
			err = json.Unmarshal(b, m)
		}
	}
	if err != nil {
		closeFiles(files)
		return nil, err
	}
	return files, nil
}

// parse returns the files of a control message.
func parse(rights []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		fds, parseErr := unix.ParseUnixRights(&m)
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "stream"))
		}
		err = errors.Join(err, parseErr)
	}
	return files, err
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
