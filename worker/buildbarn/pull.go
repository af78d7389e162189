// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"time"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// pullKey is the key of the metadata in which a Client states the pull of the container image that its action waits
// for, as a cloister.v1.ImagePull. Other schedulers ignore it.
const pullKey = "cloister-pull-bin"

// pullInterval is the interval of calls from a worker that waits for an image.
const pullInterval = 2 * time.Second

// statePull returns ctx for a call that states p, or ctx if p is nil.
func statePull(ctx context.Context, p *cloisterpb.ImagePull) context.Context {
	if p == nil {
		return ctx
	}
	b, err := proto.Marshal(p)
	if err != nil {
		return ctx // not UTF-8, so that a Server would refuse it, too
	}
	return metadata.AppendToOutgoingContext(ctx, pullKey, string(b))
}

// statedPull returns the pull that the caller states, or nil if it states none that clients can be shown.
func statedPull(ctx context.Context) *cloisterpb.ImagePull {
	stated := metadata.ValueFromIncomingContext(ctx, pullKey)
	if len(stated) != 1 || len(stated[0]) > maxText {
		return nil
	}
	p := new(cloisterpb.ImagePull)
	err := proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal([]byte(stated[0]), p)
	if err != nil || unprintable(p.Pinned) || p.ReadBytes < 0 || p.TotalBytes < 0 {
		return nil
	}
	return p
}

// showPull shows clients the pull that a waits for; nil means that it waits for none.
func (a *assignment) showPull(p *cloisterpb.ImagePull) {
	switch before := a.pull.Swap(p); {
	case before == nil && p != nil:
		a.run.Pulling(a.pull.Load)
	case before != nil && p == nil:
		a.run.Pulling(nil)
	}
}
