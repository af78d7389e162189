// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"google.golang.org/grpc"
)

// DrainContext returns a context that ends after limit or at the next signal.
func DrainContext(limit time.Duration, signals <-chan os.Signal) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// Listen opens the port of a flag.
func Listen(address, flag string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, exit.New(exit.Environment, fmt.Errorf("%s is in use by another process: stop it, or choose another port with %s", address, flag))
	}
	if _, wrong := errors.AsType[*net.AddrError](err); wrong {
		return nil, exit.New(exit.Usage, fmt.Errorf("%s %q: write ADDRESS:PORT", flag, address))
	}
	if err != nil {
		return nil, exit.New(exit.Environment, fmt.Errorf("%s %s: %w", flag, address, err))
	}
	return l, nil
}

// StopServer stops a server, and gives clients a few seconds to read their answers.
func StopServer(server *grpc.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	DrainServer(ctx, server)
}

// DrainServer stops a server once its calls have ended. When ctx ends first, it cancels them and returns true.
func DrainServer(ctx context.Context, server *grpc.Server) (cancelled bool) {
	stop := context.AfterFunc(ctx, server.Stop)
	server.GracefulStop()
	return !stop()
}
