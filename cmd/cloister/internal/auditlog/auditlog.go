// SPDX-License-Identifier: Apache-2.0

// Package auditlog gives operators a copy of a server's audit log, which they verify themselves.
package auditlog

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"time"

	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/audit"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Kinds are the kinds of lines in an audit log.
var Kinds = []string{
	string(sandbox.EventRefused), string(sandbox.EventConnect), string(sandbox.EventAllowed), string(sandbox.EventUnreachable),
	string(sandbox.EventWrite), string(sandbox.EventExec), string(sandbox.EventSyscall),
	string(sandbox.EventRead), string(sandbox.EventOutput), string(sandbox.EventLimit), "more", "note",
}

// partBytes is the size of a part of a file.
const partBytes = 64 << 10

// Register adds the service cloister.v1.AuditLog for the log in dir to r, which decides who may call it.
func Register(r grpc.ServiceRegistrar, dir string, log *slog.Logger) {
	cloisterpb.RegisterAuditLogServer(r, &server{dir: dir, log: log})
}

type server struct {
	cloisterpb.UnimplementedAuditLogServer
	dir string
	log *slog.Logger
}

func (s *server) Read(req *cloisterpb.ReadAuditLogRequest, to grpc.ServerStreamingServer[cloisterpb.ReadAuditLogResponse]) error {
	since := time.Time{}
	if req.Since != nil {
		since = req.Since.AsTime()
	}
	files, err := audit.Files(s.dir, since)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.failed(err)
	}
	for _, f := range files {
		defer f.Close()
	}
	buf := make([]byte, partBytes)
	for _, f := range files {
		for {
			n, err := f.Read(buf)
			if n > 0 || err == io.EOF { // also for an empty file
				part := &cloisterpb.ReadAuditLogResponse{FirstEntry: f.First, Data: buf[:n]}
				if err := to.Send(part); err != nil {
					return err
				}
			}
			if err == io.EOF {
				break
			}
			if err != nil {
				return s.failed(err)
			}
		}
	}
	return nil
}

// failed logs an error, which may name files of this host, and returns one without details for the client.
func (s *server) failed(err error) error {
	s.log.Error("cannot read the audit log", "err", err)
	return status.Error(codes.Internal, "reading the audit log failed; see the server's log")
}

// Download copies the log of a server into the directory dir, except files whose entries are all older than since. The
// zero since copies all of them.
func Download(ctx context.Context, conn *grpc.ClientConn, since time.Time, dir string) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &cloisterpb.ReadAuditLogRequest{}
	if !since.IsZero() {
		req.Since = timestamppb.New(since)
	}
	parts, err := cloisterpb.NewAuditLogClient(conn).Read(ctx, req)
	if err != nil {
		return err
	}
	var f *os.File
	defer func() {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	for first := uint64(0); ; {
		part, err := parts.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if f == nil || part.FirstEntry != first {
			if f != nil {
				if err := f.Close(); err != nil {
					return err
				}
			}
			first = part.FirstEntry
			if f, err = audit.CreateFile(dir, first); err != nil {
				return err
			}
		}
		if _, err := f.Write(part.Data); err != nil {
			return err
		}
	}
}
