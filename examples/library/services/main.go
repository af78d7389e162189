// SPDX-License-Identifier: Apache-2.0

// Package main serves remote execution on a gRPC server beside a service of its own: services ADDRESS DIR.
package main

import (
	"context"
	"errors"
	"log"
	"net"
	"os"
	"os/signal"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/service"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

func main() {
	namespace.Init()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := serve(ctx, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func serve(ctx context.Context, address, dir string) error {
	store, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30})
	if err != nil {
		return err
	}
	defer store.Close()
	backend := namespace.New(namespace.Config{Hidden: []string{dir}})
	defer backend.Close()
	execution, err := service.NewServer(ctx, service.Config{Worker: worker.Config{
		Name: "example", Instances: store.Instance, Backend: backend,
	}})
	if err != nil {
		return err
	}
	defer execution.Close()
	server := grpc.NewServer(casserver.ServerOptions(nil)...)
	healthpb.RegisterHealthServer(server, health.NewServer()) // the program's own service
	listener, err := net.Listen("tcp", address)
	if err := errors.Join(err, execution.Register(server)); err != nil {
		return err
	}
	context.AfterFunc(ctx, func() {
		_ = execution.Drain(context.Background()) // waits for running actions
		server.GracefulStop()
	})
	return server.Serve(listener)
}
