// SPDX-License-Identifier: Apache-2.0

// Package assetservice serves the Remote Asset API: clients push blobs and directories under URIs and qualifiers, and
// fetch them again. It contacts no origin.
//
// An asset is an entry of the action cache: it is as durable as a result, evicted like one, and shared through an
// upstream. Assets of different digest functions are different assets.
package assetservice

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	assetpb "github.com/bazelbuild/remote-apis/build/bazel/remote/asset/v1"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A Config configures the services. Both fields are required.
type Config struct {
	Instances cas.Instances
	// Index finds blobs of the local store by their hash.
	Index cloisterpb.BlobIndexServer
}

// Register adds the services Fetch and Push to r, which decides who may call them.
func Register(r grpc.ServiceRegistrar, c Config) {
	s := &server{Config: c}
	assetpb.RegisterFetchServer(r, s)
	assetpb.RegisterPushServer(r, s)
}

type server struct {
	assetpb.UnimplementedFetchServer
	assetpb.UnimplementedPushServer
	Config
}

// The kinds of assets.
const (
	blob      = "blob"
	directory = "directory"
)

// FetchBlob implements assetpb.FetchServer. An absent asset is an error of the call instead of a status in the reply,
// since no origin was asked.
func (s *server) FetchBlob(
	ctx context.Context, req *assetpb.FetchBlobRequest,
) (*assetpb.FetchBlobResponse, error) {
	a, err := s.fetch(ctx, blob, req)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	return &assetpb.FetchBlobResponse{
		Uri: a.uri, BlobDigest: a.digest.Proto(), DigestFunction: a.digest.Function().Proto(),
	}, nil
}

// FetchDirectory implements assetpb.FetchServer.
func (s *server) FetchDirectory(
	ctx context.Context, req *assetpb.FetchDirectoryRequest,
) (*assetpb.FetchDirectoryResponse, error) {
	a, err := s.fetch(ctx, directory, req)
	if err != nil {
		return nil, casstatus.Error(err)
	}
	return &assetpb.FetchDirectoryResponse{
		Uri: a.uri, RootDirectoryDigest: a.digest.Proto(), DigestFunction: a.digest.Function().Proto(),
	}, nil
}

// PushBlob implements assetpb.PushServer.
func (s *server) PushBlob(ctx context.Context, req *assetpb.PushBlobRequest) (*assetpb.PushBlobResponse, error) {
	return &assetpb.PushBlobResponse{}, casstatus.Error(s.push(ctx, blob, req, req.BlobDigest))
}

// PushDirectory implements assetpb.PushServer.
func (s *server) PushDirectory(
	ctx context.Context, req *assetpb.PushDirectoryRequest,
) (*assetpb.PushDirectoryResponse, error) {
	return &assetpb.PushDirectoryResponse{}, casstatus.Error(s.push(ctx, directory, req, req.RootDirectoryDigest))
}

// An asset is what was pushed under one URI.
type asset struct {
	uri            string
	digest         cas.Digest
	pushed, expire time.Time // expire is zero for an asset that does not expire
	// result is the entry of the action cache.
	result *repb.ActionResult
}

// fetch returns the newest usable asset of a request's URIs, or the blob with the checksum that the request states.
func (s *server) fetch(ctx context.Context, kind string, req fetchRequest) (*asset, error) {
	in, err := s.check(req)
	if err != nil {
		return nil, err
	}
	f, err := in.FunctionOf(req.GetDigestFunction(), nil)
	if err != nil {
		return nil, err
	}
	found, err := find(ctx, in, f, kind, req)
	if err != nil {
		return nil, err
	}
	why := "not pushed, or expired"
	for _, a := range found {
		err := complete(ctx, in, f, a.result)
		if err == nil {
			return a, nil
		}
		switch casstatus.Code(err) {
		case codes.NotFound, codes.InvalidArgument: // invalid if not recorded by push
			why = err.Error()
		default:
			return nil, err
		}
	}
	if a, err := s.stored(ctx, in, f, kind, req); a != nil || err != nil {
		return a, err
	}
	return nil, status.Errorf(codes.NotFound,
		"%s %+.256q (%d URIs, %d qualifiers) in instance %q: %s; push it: this server fetches nothing from origins",
		kind, req.GetUris()[0], len(req.GetUris()), len(req.GetQualifiers()), in.Name, why)
}

// find returns the assets of a request that have not expired and are not too old, the newest first.
func find(ctx context.Context, in *cas.Instance, f cas.Function, kind string, req fetchRequest) ([]*asset, error) {
	var found []*asset
	seen := map[string]bool{}
	for _, uri := range req.GetUris() {
		if seen[uri] {
			continue
		}
		seen[uri] = true
		r, err := in.Actions.Lookup(ctx, key(f, kind, uri, req.GetQualifiers()))
		if errors.Is(err, cas.ErrNotFound) {
			continue
		} else if err != nil {
			return nil, err
		}
		a, err := decode(f, kind, uri, r)
		if err != nil {
			continue // not recorded by push
		}
		oldest := req.GetOldestContentAccepted()
		if (a.expire.IsZero() || time.Now().Before(a.expire)) && (oldest == nil || !a.pushed.Before(oldest.AsTime())) {
			found = append(found, a)
		}
	}
	slices.SortStableFunc(found, func(a, b *asset) int { return b.pushed.Compare(a.pushed) })
	return found, nil
}

// push records the blob or directory p under each URI of a request.
func (s *server) push(ctx context.Context, kind string, req pushRequest, p *repb.Digest) error {
	in, err := s.check(req)
	if err != nil {
		return err
	}
	f, err := in.FunctionOf(req.GetDigestFunction(), p)
	if err != nil {
		return err
	}
	d, err := cas.FromProto(f, p)
	if err != nil {
		return err
	}
	if n := len(req.GetReferencesBlobs()) + len(req.GetReferencesDirectories()); n > maxReferences {
		return fmt.Errorf("%w: %d referenced blobs and directories, limit %d", cas.ErrInvalid, n, maxReferences)
	}
	r := encode(kind, d, req)
	err = complete(ctx, in, f, r)
	if casstatus.Code(err) == codes.NotFound {
		return status.Errorf(codes.FailedPrecondition, "push %s %s: %v; upload its blobs first", kind, d, err)
	} else if err != nil {
		return fmt.Errorf("push %s %s: %w", kind, d, err)
	}
	for _, uri := range req.GetUris() {
		if err := in.Actions.Record(ctx, key(f, kind, uri, req.GetQualifiers()), r); err != nil {
			return fmt.Errorf("push %s %s: %w", kind, d, err)
		}
	}
	return nil
}

// complete returns cas.ErrNotFound unless the store has all blobs that r refers to, and renews their leases.
func complete(ctx context.Context, in *cas.Instance, f cas.Function, r *repb.ActionResult) error {
	ds, err := cas.Closure(ctx, in.Store, f, r)
	if err != nil {
		return err
	}
	missing, err := in.Store.Missing(ctx, ds)
	if err == nil && len(missing) > 0 {
		err = fmt.Errorf("%d of the %d blobs it refers to, first %s: %w", len(missing), len(ds), missing[0], cas.ErrNotFound)
	}
	return err
}

// key returns the digest under which the action cache has an asset. Qualifiers match in any order. No Action has this
// digest, since no message begins with a zero byte: the right to execute actions does not suffice to push.
func key(f cas.Function, kind, uri string, qualifiers []*assetpb.Qualifier) cas.Digest {
	return f.Sum(keyText(kind, uri, qualifiers))
}

func keyText(kind, uri string, qualifiers []*assetpb.Qualifier) []byte {
	parts := []string{kind, uri}
	for _, q := range slices.SortedFunc(slices.Values(qualifiers), func(a, b *assetpb.Qualifier) int {
		return cmp.Compare(a.Name, b.Name)
	}) {
		parts = append(parts, q.Name, q.Value)
	}
	b := []byte("\x00cloister asset v1")
	for _, p := range parts {
		b = append(binary.AppendUvarint(b, uint64(len(p))), p...)
	}
	return b
}

// encode returns the entry of the action cache for an asset that is pushed now.
func encode(kind string, d cas.Digest, req pushRequest) *repb.ActionResult {
	r := &repb.ActionResult{ExecutionMetadata: &repb.ExecutedActionMetadata{
		Worker: "pushed as an asset", WorkerCompletedTimestamp: timestamppb.Now(),
	}}
	if t := req.GetExpireAt(); t != nil {
		// It was checked, and a Timestamp can be encoded.
		expire, _ := anypb.New(t)
		r.ExecutionMetadata.AuxiliaryMetadata = []*anypb.Any{expire}
	}
	file := func(path string, d *repb.Digest) {
		r.OutputFiles = append(r.OutputFiles, &repb.OutputFile{Path: path, Digest: d})
	}
	dir := func(path string, d *repb.Digest) {
		r.OutputDirectories = append(r.OutputDirectories, &repb.OutputDirectory{Path: path, RootDirectoryDigest: d})
	}
	if kind == blob {
		file("asset", d.Proto())
	} else {
		dir("asset", d.Proto())
	}
	for i, d := range req.GetReferencesBlobs() {
		file(fmt.Sprint("references/blobs/", i), d)
	}
	for i, d := range req.GetReferencesDirectories() {
		dir(fmt.Sprint("references/directories/", i), d)
	}
	return r
}

// decode is the inverse of encode.
func decode(f cas.Function, kind, uri string, r *repb.ActionResult) (*asset, error) {
	var p *repb.Digest
	switch {
	case kind == blob && len(r.OutputFiles) > 0:
		p = r.OutputFiles[0].GetDigest()
	case kind == directory && len(r.OutputDirectories) > 0:
		p = r.OutputDirectories[0].GetRootDirectoryDigest()
	}
	d, err := cas.FromProto(f, p)
	if err != nil {
		return nil, err
	}
	a := &asset{uri: uri, digest: d, pushed: r.GetExecutionMetadata().GetWorkerCompletedTimestamp().AsTime(), result: r}
	for _, m := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		var t timestamppb.Timestamp
		if err := m.UnmarshalTo(&t); err != nil {
			return nil, err
		}
		a.expire = t.AsTime()
	}
	return a, nil
}
