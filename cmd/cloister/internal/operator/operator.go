// SPDX-License-Identifier: Apache-2.0

// Package operator shows the workers of a server and drains them, over its cloister.v1.Fleet service.
package operator

import (
	"context"
	"fmt"

	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Fleet is the flags that select the server whose workers an operator controls.
type Fleet struct{ Server client.Server }

// Register adds the flags.
func (f *Fleet) Register(cmd *cobra.Command) {
	f.Server.RegisterAddress(cmd)
}

// Connect calls do with a client of the server, and then closes it.
func (f *Fleet) Connect(do func(cloisterpb.FleetClient) error) error {
	conn, _, err := f.Server.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(cloisterpb.NewFleetClient(conn))
}

// maxStatus is the maximum size of a status in bytes. It suffices for 140,000 busy slots with the longest names, of
// 1.8 KB each; with usual names, a slot takes 250 bytes.
const maxStatus = 256 << 20

// Status returns the state of the server.
func (f *Fleet) Status(ctx context.Context, c cloisterpb.FleetClient) (*State, error) {
	within, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	m, err := c.Status(within, &cloisterpb.StatusRequest{}, grpc.MaxCallRecvMsgSize(maxStatus))
	if err != nil {
		return nil, f.explain(ctx, err)
	}
	return stateOf(m), nil
}

// explain returns the reason of a failed call, with its exit code.
func (f *Fleet) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return interrupt.Explain(ctx, err, "stopped")
	}
	reason := remote.Reason(status.Convert(err))
	code := exit.No
	switch status.Code(err) {
	case codes.Unimplemented:
		return exit.New(exit.No, fmt.Errorf("the server at %s does not show its workers: it does not serve cloister.v1.Fleet", f.Server.Address))
	case codes.NotFound:
		code = exit.Absent
	case codes.Unavailable, codes.DeadlineExceeded:
		return f.Server.Unreachable(reason)
	}
	return exit.New(code, fmt.Errorf("%s: %w", f.Server.Address, client.Reason(err)))
}
