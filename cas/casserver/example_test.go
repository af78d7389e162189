// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"log"
	"net"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/memory"
	"github.com/cloister-build/cloister/cas/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// A cache server, and a client of it.
func ExampleRegister() {
	ctx := context.Background()
	store := memory.New(64 << 20)
	server := grpc.NewServer(casserver.ServerOptions(nil)...)
	stop, err := casserver.Register(server, casserver.Config{
		Instances: func(string) (*cas.Instance, error) { return &cas.Instance{Store: store, Actions: store}, nil },
	})
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }() // ends with Stop
	defer stop()
	defer server.Stop()

	client, err := remote.Dial(ctx, "grpc://"+listener.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	upstream, err := client.Instance("")
	if err != nil {
		log.Fatal(err)
	}
	hello, err := cas.PutBytes(ctx, upstream.Store, cas.SHA256, []byte("hello, world"))
	if err != nil {
		log.Fatal(err)
	}
	b, err := cas.ReadAll(ctx, store, hello, 1<<10)
	fmt.Printf("%s %v\n", b, err)
	// Output: hello, world <nil>
}
