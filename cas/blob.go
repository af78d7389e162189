// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// The largest blobs, in bytes, that are read as messages of the API. Decoded, a message may take "unfolded"
// times as much memory: enough for any list of files with names of usual length, but not for one of
// empty entries, which grow from two bytes each to a hundred.
const (
	MaxMessage = 16 << 20 // an Action, a Command, a Directory
	MaxTree    = 64 << 20 // a Tree
	unfolded   = 4
)

// What an entry of a message is taken to cost in memory, in bytes, besides its text. Of
// google.golang.org/protobuf v1.36.12 on a 64-bit machine the empty messages of the API take 64 to 135
// with their pointers, and an empty string 16, each about 40 more until the list has stopped growing.
const (
	messageCost = 128 // a message within a message
	stringCost  = 40  // a string or bytes in a list
)

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

// ReadProto reads the blob d into m. A blob that is no such message, or one that CheckMessage refuses,
// is ErrInvalid.
func ReadProto(ctx context.Context, s Store, d Digest, m proto.Message) error {
	_, err := ReadSized(ctx, s, d, m)
	return err
}

// ReadSized is ReadProto, and returns the bytes of memory that m is taken to cost.
func ReadSized(ctx context.Context, s Store, d Digest, m proto.Message) (int64, error) {
	b, err := ReadAll(ctx, s, d, maxBytes(m))
	if err != nil {
		return 0, err
	}
	return DecodeSized(b, d, m)
}

// DecodeSized is ReadSized for whoever has the blob d already, and has compared it with its digest.
func DecodeSized(b []byte, d Digest, m proto.Message) (int64, error) {
	cost, err := measure(b, m)
	if err != nil {
		return 0, fmt.Errorf("blob %s: %w", d, err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return 0, invalidf("blob %s is not a valid %s", d, m.ProtoReflect().Descriptor().Name())
	}
	return cost, nil
}

// maxBytes returns the size that a blob may have to be read as a message of m's type.
func maxBytes(m proto.Message) int64 {
	if _, ok := m.(*repb.Tree); ok {
		return MaxTree
	}
	return MaxMessage
}

// CheckMessage returns ErrInvalid if b, an encoded message of m's type, is too large for ReadProto as it
// is or would be once decoded. It decodes nothing and does not look at what m holds.
func CheckMessage(b []byte, m proto.Message) error {
	_, err := measure(b, m)
	return err
}

// measure is CheckMessage, and returns what b will take once decoded.
func measure(b []byte, m proto.Message) (int64, error) {
	limit, desc := maxBytes(m), m.ProtoReflect().Descriptor()
	if int64(len(b)) > limit {
		return 0, invalidf("a %s of %d bytes is larger than the %d that are read", desc.Name(), len(b), limit)
	}
	left := charge(unfolded*limit-int64(len(b)), b, desc)
	if left < 0 {
		return 0, invalidf("a %s of %d bytes with so many entries takes more than the %d bytes of memory permitted",
			desc.Name(), len(b), unfolded*limit)
	}
	return unfolded*limit - left, nil
}

// charge returns what is left of left bytes of memory after the entries of b, a message that desc
// describes: a negative number, as soon as there are too many. What is malformed costs nothing, since
// decoding ends there. Its recursion is as deep as messages of the API are nested, none of which
// contains its own type.
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
	d, err := f.SumSeeker(r)
	if err != nil {
		return Digest{}, err
	}
	return d, s.Put(ctx, d, r)
}

// Verify returns a reader of r that fails with ErrCorrupt where io.EOF would have stood, if the bytes
// read were not those of d, and as soon as there are too many of them.
func Verify(d Digest, r io.Reader) io.Reader {
	return &verifier{d: d, r: r, h: d.fn.New(d.size)}
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

// batchPuts is how many blobs PutAll stores at once in a store that is no Batcher: a store that waits for its disk can
// then commit them together.
const batchPuts = 32

// PutAll stores each of blobs in s, as Batcher has it, by its PutAll if it is one and else by Put of many at once. It
// returns an error for each, nil where it is stored.
func PutAll(ctx context.Context, s Store, blobs []Blob) []error {
	if len(blobs) == 0 {
		return nil
	}
	if b, ok := As[Batcher](s); ok {
		return b.PutAll(ctx, blobs)
	}
	errs := make([]error, len(blobs))
	parallel(len(blobs), func(i int) {
		d, data := blobs[i].Digest, blobs[i].Data
		// Put does not look at the bytes offered for a blob that is present, and these may be wrong.
		if got := d.fn.Sum(data); got != d {
			errs[i] = Mismatch(d, got)
			return
		}
		errs[i] = s.Put(ctx, d, bytes.NewReader(data))
	})
	return errs
}

// parallel calls f with 0 to n-1, batchPuts of them at once, and returns when all have. A panic of f
// becomes one of the caller, where it ends a call and not the process.
func parallel(n int, f func(i int)) {
	var group sync.WaitGroup
	turn := make(chan struct{}, batchPuts)
	panics := make(chan any, 1)
	for i := range n {
		turn <- struct{}{}
		group.Go(func() {
			defer func() {
				<-turn
				if p := recover(); p != nil {
					select {
					case panics <- p:
					default: // the first is enough
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
