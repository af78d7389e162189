// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// MaxMessage is the largest blob, in bytes, that is read as a message of the API: an Action, a
// Command, a Directory or a Tree.
const MaxMessage = 256 << 20

// ReadAll returns the blob d. A blob above limit bytes is ErrInvalid; otherwise errors are those of
// Store.Open.
func ReadAll(ctx context.Context, s Store, d Digest, limit int64) ([]byte, error) {
	if d.size > limit {
		return nil, invalidf("blob %s is larger than the %d bytes that are read at once", d, limit)
	}
	r, err := s.Open(ctx, d, 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := make([]byte, d.size)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	// The store reports corruption where the end should be.
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		if err == nil {
			err = ErrCorrupt
		}
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	return b, nil
}

// ReadProto reads the blob d into m. A blob that is no such message is ErrInvalid.
func ReadProto(ctx context.Context, s Store, d Digest, m proto.Message) error {
	b, err := ReadAll(ctx, s, d, MaxMessage)
	if err != nil {
		return err
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return invalidf("blob %s is not a valid %s", d, m.ProtoReflect().Descriptor().Name())
	}
	return nil
}

// PutBytes stores b and returns its digest.
func PutBytes(ctx context.Context, s Store, f Function, b []byte) (Digest, error) {
	d := f.Sum(b)
	return d, s.Put(ctx, d, bytes.NewReader(b))
}

// PutProto stores the deterministic encoding of m and returns its digest.
func PutProto(ctx context.Context, s Store, f Function, m proto.Message) (Digest, error) {
	b, d, err := MarshalProto(f, m)
	if err != nil {
		return Digest{}, err
	}
	return d, s.Put(ctx, d, bytes.NewReader(b))
}

// PutSeeker stores what r holds from its start to its end, and returns its digest. It reads r twice:
// once for the name and once for the store.
func PutSeeker(ctx context.Context, s Store, f Function, r io.ReadSeeker) (Digest, error) {
	h := f.New()
	n, err := io.Copy(h, r)
	if err != nil {
		return Digest{}, err
	}
	d := f.Digest(h, n)
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return Digest{}, err
	}
	return d, s.Put(ctx, d, r)
}

// Verify returns a reader of r that fails with ErrCorrupt where io.EOF would have stood, if the bytes
// read were not those of d, and as soon as there are too many of them.
func Verify(d Digest, r io.Reader) io.Reader {
	return &verifier{d: d, r: r, h: d.fn.New()}
}

type verifier struct {
	d Digest
	r io.Reader
	h interface {
		io.Writer
		Sum([]byte) []byte
	}
	n int64
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.r.Read(p)
	v.h.Write(p[:n])
	v.n += int64(n)
	if v.n > v.d.size || err == io.EOF && (v.n != v.d.size || fmt.Sprintf("%x", v.h.Sum(nil)) != v.d.hash) {
		return n, ErrCorrupt
	}
	return n, err
}
