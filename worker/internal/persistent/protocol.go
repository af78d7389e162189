// SPDX-License-Identifier: Apache-2.0

package persistent

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/protobuf/encoding/protowire"
)

// maxResponse bounds an encoded WorkResponse, in bytes.
const maxResponse = 64 << 20

// errGarbage means that the process wrote something that is not a WorkResponse.
var errGarbage = errors.New("it wrote something other than a WorkResponse to stdout")

// garbage returns an errGarbage that shows what is buffered.
func garbage(r *bufio.Reader) error {
	text, _ := r.Peek(r.Buffered())
	return fmt.Errorf("%w: %q", errGarbage, printable.Head(string(text), 200))
}

// A codec encodes requests and decodes responses.
type codec interface {
	encode(r *Request) ([]byte, error)
	// decode reads a response. It returns io.EOF at the end of the stream, and errGarbage as soon as it can tell.
	decode(r *bufio.Reader) (Response, error)
}

// protocolBuffers is the codec for messages of worker_protocol.proto, each after its length.
type protocolBuffers struct{}

// The numbers of fields in worker_protocol.proto.
const (
	requestArguments  = 1
	requestInputs     = 2
	inputPath         = 1
	inputDigest       = 2
	responseExit      = 1
	responseOutput    = 2
	responseRequest   = 3
	responseCancelled = 4
)

func (protocolBuffers) encode(r *Request) ([]byte, error) {
	var b, in []byte
	for _, a := range r.Arguments {
		b = protowire.AppendString(protowire.AppendTag(b, requestArguments, protowire.BytesType), a)
	}
	for _, i := range r.Inputs {
		in = protowire.AppendString(protowire.AppendTag(in[:0], inputPath, protowire.BytesType), i.Path)
		in = protowire.AppendString(protowire.AppendTag(in, inputDigest, protowire.BytesType), i.Digest.Hash())
		b = protowire.AppendBytes(protowire.AppendTag(b, requestInputs, protowire.BytesType), in)
	}
	return append(protowire.AppendVarint(nil, uint64(len(b))), b...), nil
}

// firstTags are the tags with which a WorkResponse can begin.
var firstTags = []byte{
	responseExit<<3 | byte(protowire.VarintType), responseOutput<<3 | byte(protowire.BytesType),
	responseRequest<<3 | byte(protowire.VarintType), responseCancelled<<3 | byte(protowire.VarintType),
}

func (protocolBuffers) decode(r *bufio.Reader) (res Response, err error) {
	size, n, err := peekLength(r)
	if err != nil {
		return res, err
	}
	if size > 0 {
		// Text has a plausible length but no such tag. Waiting for the rest would take until the timeout.
		if head, err := r.Peek(n + 1); err == nil && !slices.Contains(firstTags, head[n]) {
			return res, garbage(r)
		}
	}
	_, _ = r.Discard(n)
	b, err := io.ReadAll(io.LimitReader(r, int64(size)))
	if err == nil && len(b) < int(size) {
		err = io.ErrUnexpectedEOF
	}
	for err == nil && len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return res, fmt.Errorf("%w: a message that cannot be decoded", errGarbage)
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return res, fmt.Errorf("%w: a message that cannot be decoded", errGarbage)
		}
		v, _ := protowire.ConsumeVarint(b)
		switch {
		case number == responseExit && kind == protowire.VarintType:
			res.ExitCode = int32(v)
		case number == responseOutput && kind == protowire.BytesType:
			text, _ := protowire.ConsumeBytes(b)
			res.Output = string(text)
		case number == responseRequest && v != 0:
			return res, fmt.Errorf("%w: it answers request %d, which does not exist", errGarbage, v)
		}
		b = b[n:]
	}
	return res, err
}

// peekLength returns the length of a message and the number of bytes that encode it.
func peekLength(r *bufio.Reader) (size uint64, n int, err error) {
	for i := 1; ; i++ {
		b, err := r.Peek(i)
		if err != nil {
			return 0, 0, err
		}
		if size, n = protowire.ConsumeVarint(b); n < 0 && i < 5 {
			continue
		}
		if n < 0 || size > maxResponse {
			return 0, 0, garbage(r)
		}
		return size, n, nil
	}
}

// lines is the codec for JSON, in which each message is a line.
type lines struct{}

type jsonRequest struct {
	Arguments []string    `json:"arguments"`
	Inputs    []jsonInput `json:"inputs"`
}

type jsonInput struct {
	Path   string `json:"path"`
	Digest string `json:"digest"`
}

type jsonResponse struct {
	ExitCode  int32  `json:"exitCode"`
	Output    string `json:"output"`
	RequestID int64  `json:"requestId"`
}

func (lines) encode(r *Request) ([]byte, error) {
	m := jsonRequest{Arguments: r.Arguments}
	for _, i := range r.Inputs {
		m.Inputs = append(m.Inputs, jsonInput{i.Path, i.Digest.Hash()})
	}
	b, err := json.Marshal(m)
	return append(b, '\n'), err
}

func (lines) decode(r *bufio.Reader) (Response, error) {
	if first, err := r.Peek(1); err != nil {
		return Response{}, err
	} else if first[0] != '{' {
		return Response{}, garbage(r)
	}
	var b []byte
	for {
		part, err := r.ReadSlice('\n')
		b = append(b, part...)
		switch {
		case len(b) > maxResponse:
			return Response{}, fmt.Errorf("%w: a line of more than %d bytes", errGarbage, maxResponse)
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return Response{}, err
		}
		break
	}
	var m jsonResponse
	if err := json.Unmarshal(b, &m); err != nil {
		return Response{}, fmt.Errorf("%w: %q: %w", errGarbage, printable.Head(string(b), 200), err)
	}
	if m.RequestID != 0 {
		return Response{}, fmt.Errorf("%w: it answers request %d, which does not exist", errGarbage, m.RequestID)
	}
	return Response{m.ExitCode, m.Output}, nil
}
