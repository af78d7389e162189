// SPDX-License-Identifier: Apache-2.0

package diskctl

import (
	"fmt"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Text from the server is made printable: if root is the client, the server may be another user's process.

func fromStats(s disk.Stats) *cloisterpb.StatResponse {
	return &cloisterpb.StatResponse{
		Blobs: int64(s.Blobs), Results: int64(s.Results), Bytes: s.Bytes, MaxBytes: s.MaxBytes,
		Files: s.Files, MaxFiles: s.MaxFiles,
		Segments: int64(s.Segments), Lease: durationpb.New(s.Lease),
		EvictedBlobs: s.EvictedBlobs, EvictedBytes: s.EvictedBytes, Corrupt: s.Corrupt, HeldBytes: s.HeldBytes,
	}
}

func toStats(m *cloisterpb.StatResponse) disk.Stats {
	return disk.Stats{
		Blobs: int(m.Blobs), Results: int(m.Results), Bytes: m.Bytes, MaxBytes: m.MaxBytes,
		Files: m.Files, MaxFiles: m.MaxFiles,
		Segments: int(m.Segments), Lease: m.Lease.AsDuration(),
		EvictedBlobs: m.EvictedBlobs, EvictedBytes: m.EvictedBytes, Corrupt: m.Corrupt, HeldBytes: m.HeldBytes,
	}
}

func fromCollect(r *disk.CollectReport) *cloisterpb.CollectResponse {
	m := &cloisterpb.CollectResponse{
		Blobs: int64(r.Blobs), Files: int64(r.Files), Copies: int64(r.Copies), Segments: int64(r.Segments),
		Freed: r.Freed, Moved: r.Moved, Bytes: r.Bytes, MaxBytes: r.MaxBytes, Leased: r.Leased, Pinned: r.Pinned,
	}
	for _, a := range r.Ages {
		m.Ages = append(m.Ages, &cloisterpb.Age{Label: a.Label, Leased: a.Leased, Blobs: a.Blobs, Bytes: a.Bytes})
	}
	return m
}

func toCollect(m *cloisterpb.CollectResponse) disk.CollectReport {
	r := disk.CollectReport{
		Blobs: int(m.Blobs), Files: int(m.Files), Copies: int(m.Copies), Segments: int(m.Segments),
		Freed: m.Freed, Moved: m.Moved, Bytes: m.Bytes, MaxBytes: m.MaxBytes, Leased: m.Leased, Pinned: m.Pinned,
	}
	for _, a := range m.Ages {
		r.Ages = append(r.Ages, disk.AgeBucket{
			Label: printable.Text(a.Label), Leased: a.Leased, Blobs: a.Blobs, Bytes: a.Bytes,
		})
	}
	return r
}

func fromVerify(r *disk.VerifyReport) *cloisterpb.VerifyResponse {
	m := &cloisterpb.VerifyResponse{Blobs: r.Blobs, Bytes: r.Bytes, TotalBytes: r.TotalBytes, Resumed: r.Resumed}
	for _, d := range r.Damaged {
		p := &cloisterpb.Damage{Instance: d.Instance, Where: d.Where}
		if !d.Digest.IsZero() {
			p.Digest = d.Digest.String()
		}
		m.Damaged = append(m.Damaged, p)
	}
	return m
}

func toVerify(m *cloisterpb.VerifyResponse) (disk.VerifyReport, error) {
	r := disk.VerifyReport{Blobs: m.Blobs, Bytes: m.Bytes, TotalBytes: m.TotalBytes, Resumed: m.Resumed}
	for _, p := range m.Damaged {
		var d cas.Digest
		if p.Digest != "" {
			var err error
			if d, err = cas.ParseDigest(p.Digest); err != nil {
				return r, fmt.Errorf("response of the process that has the store open: %w", err)
			}
		}
		r.Damaged = append(r.Damaged, disk.Damage{Instance: p.Instance, Digest: d, Where: printable.Text(p.Where)})
	}
	return r, nil
}
