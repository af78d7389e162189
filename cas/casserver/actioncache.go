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
	"github.com/cloister-build/cloister/cas/casstatus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// actionCache is the ActionCache service.
type actionCache struct {
	repb.UnimplementedActionCacheServer
	Config
}

// GetActionResult returns the recorded result of an action if all blobs it refers to are present, and marks them as
// used. A result above the message limit, which only a worker can record, is FAILED_PRECONDITION rather than NOT_FOUND:
// executing the action again would not help.
func (s *actionCache) GetActionResult(
	ctx context.Context, req *repb.GetActionResultRequest,
) (*repb.ActionResult, error) {
	in, action, err := s.entry(req)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	r, err := cas.LookupComplete(ctx, in, action)
	if code := casstatus.Code(err); s.OnLookup != nil && (code == codes.OK || code == codes.NotFound) {
		s.OnLookup(ctx, req.InstanceName, action, r)
	}
	if err == nil {
		err = cas.Inline(ctx, in.Store, r, cas.Inlining{Function: action.Function(), Hints: req, MaxBytes: maxReply})
	}
	switch {
	case errors.Is(err, cas.ErrNotFound), errors.Is(err, cas.ErrCorrupt):
		// If anything is absent or damaged, the client can only execute the action.
		return nil, status.Error(codes.NotFound, actionError(action, err).Error())
	case err != nil:
		return nil, casstatus.Error(actionError(action, err))
	}
	if n := proto.Size(r); n > maxMessage {
		return nil, tooLarge(codes.FailedPrecondition, action, n, maxMessage)
	}
	return r, nil
}

// entry returns the instance and the action of a request.
func (s *actionCache) entry(req interface {
	GetInstanceName() string
	GetDigestFunction() repb.DigestFunction_Value
	GetActionDigest() *repb.Digest
},
) (*cas.Instance, cas.Digest, error) {
	in, err := s.Instances(req.GetInstanceName())
	if err != nil {
		return nil, cas.Digest{}, err
	}
	if in.Actions == nil {
		return nil, cas.Digest{}, fmt.Errorf("casserver: instance %q has no Actions", in.Name)
	}
	action, err := digest(in, req.GetDigestFunction(), req.GetActionDigest())
	return in, action, err
}

// tooLarge is the error for a result of n bytes above limit.
func tooLarge(code codes.Code, action cas.Digest, n, limit int) error {
	return status.Errorf(code,
		"result of action %s has %d bytes, limit %d; declare fewer outputs or output directories", action, n, limit)
}

// actionError adds the action to err unless err already names it.
func actionError(action cas.Digest, err error) error {
	if strings.Contains(err.Error(), action.String()) {
		return err
	}
	return fmt.Errorf("result of action %s: %w", action, err)
}

// UpdateActionResult records the result of a successful action after checking that all its blobs are present. Inlined
// contents are stored as blobs. The rest must fit into maxReply, so that the result can always be returned; a larger
// one is INVALID_ARGUMENT.
func (s *actionCache) UpdateActionResult(
	ctx context.Context, req *repb.UpdateActionResultRequest,
) (*repb.ActionResult, error) {
	in, action, err := s.entry(req)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	r := req.ActionResult
	if err := checkResult(r); err != nil {
		return nil, casstatus.Error(actionError(action, err))
	}
	if err := s.storeInlined(ctx, in.Store, action.Function(), r); err != nil {
		return nil, casstatus.Error(actionError(action, err))
	}
	if n := proto.Size(r); n > maxReply {
		return nil, tooLarge(codes.InvalidArgument, action, n, maxReply)
	}
	ds, err := cas.Closure(ctx, in.Store, action.Function(), r)
	if errors.Is(err, cas.ErrNotFound) {
		return nil, status.Errorf(codes.FailedPrecondition,
			"result of action %s: %v; upload the outputs first", action, err)
	} else if err != nil {
		return nil, casstatus.Error(actionError(action, err))
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	if len(missing) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition,
			"result of action %s refers to %d missing blobs, first %s; upload the outputs first",
			action, len(missing), missing[0])
	}
	if err := in.Actions.Record(ctx, action, r); err != nil {
		return nil, casstatus.Error(actionError(action, err))
	}
	if s.OnUpdate != nil {
		s.OnUpdate(ctx, req.InstanceName, action, r)
	}
	return r, nil
}

// checkResult returns cas.ErrInvalid for results that clients may not record: failures (rule 68) and paths outside the
// working directory (rule 66). Closure checks the digests.
func checkResult(r *repb.ActionResult) error {
	if r == nil {
		return fmt.Errorf("%w: action_result is not set", cas.ErrInvalid)
	}
	if r.ExitCode != 0 {
		return fmt.Errorf("%w: exit_code is %d; only successful actions are recorded", cas.ErrInvalid, r.ExitCode)
	}
	return cas.CheckOutputs(r)
}

// storeInlined moves the inlined contents of r into s and leaves their digests. Contents that do not match the digest
// next to them are cas.ErrMismatch, too large ones cas.ErrInvalid.
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
			return c.explain("store", d, err)
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
