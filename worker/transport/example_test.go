// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"fmt"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/worker/transport"
)

// A store behind a server that wants a token.
func ExampleCredentials_DialOptions() {
	credentials := transport.Credentials{TokenVariable: "CACHE_TOKEN"}
	options, err := credentials.DialOptions("grpcs://cache.example.com:443")
	if err != nil {
		fmt.Println(err)
		return
	}
	client, err := remote.New("grpcs://cache.example.com:443/main", options...)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer client.Close()

	_, err = transport.Credentials{CA: "ca.pem"}.DialOptions("grpc://cache.example.com:80")
	fmt.Println(err)
	// Output: transport: Credentials.CA and Cert need a server with TLS: write its address as grpcs://HOST:PORT
}
