// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// actionCache is the ActionCache service.
type actionCache struct {
	repb.UnimplementedActionCacheServer
	Config
}

// GetActionResult returns the result recorded for an action if all that it refers to is present, and
// marks that as used. One that does not fit into a message, which only a worker may have recorded, is
// FAILED_PRECONDITION: to execute the action again would not help.
func (s *actionCache) GetActionResult(ctx context.Context, req *repb.GetActionResultRequest) (*repb.ActionResult, error) {
	in, action, err := s.entry(req)
	if err != nil {
		return nil, cas.Status(err)
	}
	r, err := cas.LookupComplete(ctx, in, action)
	if code := cas.Code(err); s.Asked != nil && (code == codes.OK || code == codes.NotFound) {
		s.Asked(ctx, req.InstanceName, action, r)
	}
	if err == nil {
		err = cas.Inline(ctx, in.Store, r, cas.Inlining{Function: action.Function(), Hints: req, MaxBytes: maxReply})
	}
	switch {
	case errors.Is(err, cas.ErrNotFound), errors.Is(err, cas.ErrCorrupt):
		// Whatever is absent or damaged, the client can only execute the action.
		return nil, status.Error(codes.NotFound, ofAction(action, err).Error())
	case err != nil:
		return nil, cas.Status(ofAction(action, err))
	}
	if n := proto.Size(r); n > maxMessage {
		return nil, status.Errorf(codes.FailedPrecondition,
			"result of action %s has %d bytes, above the %d of one message; declare fewer outputs, or directories in their place",
			action, n, maxMessage)
	}
	return r, nil
}

// entry returns the instance and the action that a request of the service names.
func (s *actionCache) entry(req interface {
	GetInstanceName() string
	GetDigestFunction() repb.DigestFunction_Value
	GetActionDigest() *repb.Digest
}) (*cas.Instance, cas.Digest, error) {
	in, err := s.Instances(req.GetInstanceName())
	if err != nil {
		return nil, cas.Digest{}, err
	}
	action, err := digest(in, req.GetDigestFunction(), req.GetActionDigest())
	return in, action, err
}

// ofAction returns err with the action in its text.
func ofAction(action cas.Digest, err error) error {
	if strings.Contains(err.Error(), action.String()) {
		return err
	}
	return fmt.Errorf("result of action %s: %w", action, err)
}

// UpdateActionResult records a result that a client vouches for: that of a success, all of which is
// present. What the client sent inline is stored as blobs. What is left must fit into a reply with room
// to spare, so that what is recorded can be delivered; a larger one is INVALID_ARGUMENT, as is all else
// that is too large.
func (s *actionCache) UpdateActionResult(ctx context.Context, req *repb.UpdateActionResultRequest) (*repb.ActionResult, error) {
	in, action, err := s.entry(req)
	if err != nil {
		return nil, cas.Status(err)
	}
	if s.ReadOnlyActions {
		return nil, status.Error(codes.PermissionDenied,
			"action results come from execution alone; disable the upload of local results")
	}
	r := req.ActionResult
	if err := checkResult(r); err != nil {
		return nil, cas.Status(fmt.Errorf("result of action %s: %w", action, err))
	}
	if err := s.storeInlined(ctx, in.Store, action.Function(), r); err != nil {
		return nil, cas.Status(fmt.Errorf("result of action %s: %w", action, err))
	}
	if n := proto.Size(r); n > maxReply {
		return nil, status.Errorf(codes.InvalidArgument,
			"result of action %s has %d bytes, above the %d that are recorded; "+
				"declare fewer outputs, or directories in their place", action, n, maxReply)
	}
	ds, err := cas.Closure(ctx, in.Store, action.Function(), r)
	if errors.Is(err, cas.ErrNotFound) {
		return nil, status.Errorf(codes.FailedPrecondition,
			"result of action %s: %v; upload the outputs first", action, err)
	} else if err != nil {
		return nil, cas.Status(fmt.Errorf("result of action %s: %w", action, err))
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err != nil {
		return nil, cas.Status(err)
	}
	if len(missing) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition,
			"result of action %s refers to %d absent blobs, first %s; upload the outputs first",
			action, len(missing), missing[0])
	}
	if err := in.Actions.Record(ctx, action, r); err != nil {
		return nil, cas.Status(fmt.Errorf("result of action %s: %w", action, err))
	}
	if s.Uploaded != nil {
		s.Uploaded(ctx, req.InstanceName, action, r)
	}
	return r, nil
}

// checkResult returns cas.ErrInvalid for a result that no client may record: a failure (rule 68), or
// one with a path that leads out of the working directory (rule 66). Digests are Closure's business.
func checkResult(r *repb.ActionResult) error {
	if r == nil {
		return fmt.Errorf("%w: action_result is not set", cas.ErrInvalid)
	}
	if r.ExitCode != 0 {
		return fmt.Errorf("%w: exit_code is %d; only successes are recorded", cas.ErrInvalid, r.ExitCode)
	}
	return cas.CheckOutputs(r)
}

// storeInlined puts what r carries within itself into s, and leaves the digests in its place. Bytes
// that are not those of a digest beside them are cas.ErrMismatch, too many of them cas.ErrInvalid.
func (c *Config) storeInlined(ctx context.Context, s cas.Store, f cas.Function, r *repb.ActionResult) error {
	move := func(data *[]byte, p **repb.Digest) error {
		if len(*data) == 0 {
			return nil
		}
		d := f.Sum(*data)
		if *p != nil {
			stated, err := cas.FromProto(f, *p)
			if err != nil {
				return err
			}
			if stated != d {
				return cas.Mismatch(stated, d)
			}
		}
		if err := c.checkSize(d); err != nil {
			return err
		}
		if err := s.Put(ctx, d, bytes.NewReader(*data)); err != nil {
			return explain("store", d, err)
		}
		*data, *p = nil, d.Proto()
		return nil
	}
	if err := move(&r.StdoutRaw, &r.StdoutDigest); err != nil {
		return err
	}
	if err := move(&r.StderrRaw, &r.StderrDigest); err != nil {
		return err
	}
	for _, file := range r.OutputFiles {
		if err := move(&file.Contents, &file.Digest); err != nil {
			return err
		}
	}
	return nil
}
