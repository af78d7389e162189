// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"bytes"
	"context"
	"fmt"
	"hash"
	"io"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Size limits of the API messages that ReadProto decodes, in bytes. Once decoded, a message may take maxExpansion times
// as much memory. This suffices for any list of files with ordinary names, but not for a list of empty entries, which
// grow from two bytes each to a hundred.
const (
	MaxMessage   = 16 << 20 // an Action, a Command, a Directory
	MaxTree      = 64 << 20 // a Tree
	maxExpansion = 4
)

// The estimated cost of a list entry in memory, in bytes, not counting its text. With google.golang.org/protobuf
// v1.36.12 on a 64-bit machine, an empty message takes 64 to 135 bytes including its pointer, and an empty string 16; a
// growing list adds about 40 to each.
const (
	messageCost = 128
	stringCost  = 40
)

// ReadAll returns the content of d. A blob larger than limit bytes is ErrInvalid; other errors are those of Store.Open.
func ReadAll(ctx context.Context, s Store, d Digest, limit int64) ([]byte, error) {
	if err := CheckDigests(d); err != nil {
		return nil, err
	}
	if d.size > limit {
		return nil, invalidf("blob %s is larger than the limit of %d bytes", d, limit)
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
	// The store reports corruption instead of io.EOF.
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		if err == nil {
			err = ErrCorrupt
		}
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	return b, nil
}

// ReadProto reads the blob d into m. It returns ErrInvalid if the blob is not such a message, if CheckMessage refuses
// it, or if m is nil.
func ReadProto(ctx context.Context, s Store, d Digest, m proto.Message) error {
	_, err := ReadSized(ctx, s, d, m)
	return err
}

// ReadSized is ReadProto and returns the estimated size of m in memory, in bytes.
func ReadSized(ctx context.Context, s Store, d Digest, m proto.Message) (int64, error) {
	if err := checkTarget(m); err != nil {
		return 0, err
	}
	b, err := ReadAll(ctx, s, d, maxBytes(m))
	if err != nil {
		return 0, err
	}
	return DecodeSized(b, d, m)
}

// DecodeSized is ReadSized for the verified content b of d.
func DecodeSized(b []byte, d Digest, m proto.Message) (int64, error) {
	if err := checkTarget(m); err != nil {
		return 0, err
	}
	cost, err := measure(b, m)
	if err != nil {
		return 0, fmt.Errorf("blob %s: %w", d, err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return 0, invalidf("blob %s is not a valid %s", d, m.ProtoReflect().Descriptor().Name())
	}
	return cost, nil
}

// checkTarget returns ErrInvalid for a nil message.
func checkTarget(m proto.Message) error {
	if m == nil || !m.ProtoReflect().IsValid() {
		return invalidf("the message is missing")
	}
	return nil
}

// maxBytes returns the maximum size of an encoded message of m's type.
func maxBytes(m proto.Message) int64 {
	if _, ok := m.(*repb.Tree); ok {
		return MaxTree
	}
	return MaxMessage
}

// CheckMessage returns ErrInvalid if b, an encoded message of m's type, is or would decode to more than ReadProto
// permits, or if m is nil. It decodes nothing and does not check the fields.
func CheckMessage(b []byte, m proto.Message) error {
	if err := checkTarget(m); err != nil {
		return err
	}
	_, err := measure(b, m)
	return err
}

// measure is CheckMessage and returns the estimated size of the decoded message.
func measure(b []byte, m proto.Message) (int64, error) {
	limit, desc := maxBytes(m), m.ProtoReflect().Descriptor()
	if int64(len(b)) > limit {
		return 0, invalidf("a %s of %d bytes is larger than the limit of %d", desc.Name(), len(b), limit)
	}
	left := charge(maxExpansion*limit-int64(len(b)), b, desc)
	if left < 0 {
		return 0, invalidf("a %s of %d bytes would take more than %d bytes of memory: it has too many entries",
			desc.Name(), len(b), maxExpansion*limit)
	}
	return maxExpansion*limit - left, nil
}

// charge subtracts the cost of the entries of b, a message that desc describes, from left and returns the rest. It
// stops when that is negative, or where b is malformed, as decoding does. The recursion ends because no message of
// the API contains its own type.
func charge(left int64, b []byte, desc protoreflect.MessageDescriptor) int64 {
	fields := desc.Fields()
	for len(b) > 0 && left >= 0 {
		num, typ, tag := protowire.ConsumeTag(b)
		if tag < 0 {
			return left
		}
		n := protowire.ConsumeFieldValue(num, typ, b[tag:])
		if n < 0 {
			return left
		}
		value := b[tag : tag+n]
		b = b[tag+n:]
		if typ != protowire.BytesType {
			continue
		}
		switch f := fields.ByNumber(num); {
		case f == nil:
		case f.Message() != nil:
			inner, _ := protowire.ConsumeBytes(value)
			left = charge(left-messageCost, inner, f.Message())
		case f.IsList():
			left -= stringCost
		}
	}
	return left
}

// PutBytes stores b and returns its digest.
func PutBytes(ctx context.Context, s Store, f Function, b []byte) (Digest, error) {
	d := f.Sum(b)
	if err := CheckDigests(d); err != nil {
		return d, err
	}
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

// PutSeeker stores the content of r from start to end, and returns its digest. It reads r twice.
func PutSeeker(ctx context.Context, s Store, f Function, r io.ReadSeeker) (Digest, error) {
	d, err := f.SumSeeker(r)
	if err != nil {
		return Digest{}, err
	}
	return d, s.Put(ctx, d, r)
}

// Verify returns a reader of r that fails with ErrCorrupt at the end if the content does not match d, or earlier if the
// content is too long. For the zero Digest it fails with ErrInvalid.
func Verify(d Digest, r io.Reader) io.Reader {
	if err := CheckDigests(d); err != nil {
		return failingReader{err}
	}
	return &verifier{d: d, r: r, h: d.fn.New(d.size)}
}

type failingReader struct{ err error }

func (r failingReader) Read([]byte) (int, error) { return 0, r.err }

type verifier struct {
	d Digest
	r io.Reader
	h hash.Hash
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

// parallelPuts is the number of concurrent Puts in PutAll: a store that syncs its disk can commit them together.
const parallelPuts = 32

// PutAll stores blobs in s as Batcher.PutAll does. If s is not a Batcher, it calls Put concurrently.
func PutAll(ctx context.Context, s Store, blobs []Blob) []error {
	if len(blobs) == 0 {
		return nil
	}
	if b, ok := As[Batcher](s); ok {
		return b.PutAll(ctx, blobs)
	}
	errs := make([]error, len(blobs))
	parallel(len(blobs), func(i int) {
		// Put need not verify content for a blob that is present.
		if errs[i] = blobs[i].Check(); errs[i] != nil {
			return
		}
		errs[i] = s.Put(ctx, blobs[i].Digest, bytes.NewReader(blobs[i].Data))
	})
	return errs
}

// parallel calls f(0) to f(n-1), parallelPuts at a time, and waits. It re-panics in the caller, so that a panic ends
// one request and not the process.
func parallel(n int, f func(i int)) {
	var group sync.WaitGroup
	slots := make(chan struct{}, parallelPuts)
	panics := make(chan any, 1)
	for i := range n {
		slots <- struct{}{}
		group.Go(func() {
			defer func() {
				<-slots
				if p := recover(); p != nil {
					select {
					case panics <- p:
					default: // report the first
					}
				}
			}()
			f(i)
		})
	}
	group.Wait()
	select {
	case p := <-panics:
		panic(p)
	default:
	}
}
