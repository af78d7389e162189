// SPDX-License-Identifier: Apache-2.0

// Package main executes actions for a head, in the sandbox of this machine: worker HEAD.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	namespace.Init()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := work(ctx, os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

// work takes actions from the workers' port of a head, and reads and writes their files there.
func work(ctx context.Context, head string) error {
	conn, err := grpc.NewClient(head, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	store, err := remote.New("grpc://" + head)
	if err != nil {
		return err
	}
	defer store.Close()
	backend := namespace.New(namespace.Config{})
	defer backend.Close()
	w, err := service.NewWorker(ctx, conn, service.Config{Slots: 1, Worker: worker.Config{
		Name: "example", Instances: store.Instance, Backend: backend,
	}})
	if err != nil {
		return err
	}
	defer w.Close()
	context.AfterFunc(ctx, w.Drain)
	w.Run(context.Background()) // returns when it is drained
	return nil
}
