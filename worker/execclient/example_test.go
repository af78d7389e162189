// SPDX-License-Identifier: Apache-2.0

package execclient_test

import (
	"context"
	"fmt"
	"log"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/execclient"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// An action executed by a server that already has its inputs.
func ExampleNew() {
	conn, err := grpc.NewClient("127.0.0.1:8980", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	client, err := execclient.New(conn, "main")
	if err != nil {
		log.Fatal(err)
	}
	action, err := cas.ParseDigest("09ca7e4eaa6e8ae9c7d261167129184883644d07dfba7cbfbc4c8a2e08360d5b/12")
	if err != nil {
		log.Fatal(err)
	}
	outcome, err := client.Execute(context.Background(), &worker.Task{Action: action}, func(worker.Stage) {})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(outcome.Result.GetExitCode())
}
