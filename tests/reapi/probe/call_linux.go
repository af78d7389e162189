// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
)

// call makes a gRPC call with one request on a UNIX socket, and prints the number and the message of its status.
func call(o []string) error {
	message, err := hex.DecodeString(o[2])
	if err != nil {
		return err
	}
	transport := &http.Transport{Protocols: &http.Protocols{}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", o[0])
	}}
	transport.Protocols.SetUnencryptedHTTP2(true)
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	req, err := http.NewRequest(http.MethodPost, "http://localhost"+o[1], bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil { // trailers follow
		return err
	}
	get := func(name string) string { return cmp.Or(resp.Trailer.Get(name), resp.Header.Get(name)) }
	fmt.Println(get("grpc-status"), get("grpc-message"))
	return nil
}
