// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// smallFile is the size in bytes up to which a file is read into memory and stored together with others.
const smallFile = 64 << 10

// put adds every file found to b and sets the digests of their entries.
func (s *scanner) put(ctx context.Context, b *cas.Batch, f cas.Function) error {
	return each(ctx, len(s.batches), func(ctx context.Context, i int) error {
		files := s.batches[i]
		p := files.dir.path()
		dir, err := s.root.OpenRoot(p)
		if err != nil {
			return err
		}
		defer dir.Close()
		for _, u := range files.files {
			if err := putFile(ctx, b, f, dir, u); err != nil {
				return fmt.Errorf("put %+.256q: %w", join(p, u.name), err)
			}
		}
		return nil
	})
}

func putFile(ctx context.Context, b *cas.Batch, f cas.Function, dir *os.Root, u unreadFile) error {
	if u.size == 0 {
		u.digest = f.Sum(nil)
		return nil
	}
	file, err := dir.Open(u.name)
	if err != nil {
		return err
	}
	defer file.Close()
	if u.size > smallFile {
		u.digest, err = b.AddSeeker(ctx, f, &contextReader{ctx, file})
		return err
	}
	data := make([]byte, u.size)
	if _, err := io.ReadFull(file, data); err != nil {
		return err
	}
	u.digest, err = b.AddBytes(ctx, f, data)
	return err
}

// A contextReader reads a file until its context ends. Even a small disk can hold sparse files that take days to read.
type contextReader struct {
	ctx  context.Context
	file *os.File
}

func (r *contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.file.Read(p)
}

func (r *contextReader) Seek(offset int64, whence int) (int64, error) {
	return r.file.Seek(offset, whence)
}

// putTree adds dirs, parents first, to b in the requested format: as one Tree, as Directories, or both. An unknown
// format is TREE_ONLY (rule 82).
func (s *scanner) putTree(ctx context.Context, b *cas.Batch, f cas.Function, dirs []*directory,
	format repb.Command_OutputDirectoryFormat,
) (*repb.OutputDirectory, error) {
	blobs, err := encodeAll(f, dirs)
	if err != nil {
		return nil, err
	}
	out := &repb.OutputDirectory{}
	if format == repb.Command_DIRECTORY_ONLY || format == repb.Command_TREE_AND_DIRECTORY {
		out.RootDirectoryDigest = blobs[0].Digest.Proto()
		if err := s.putDirectories(ctx, b, blobs); err != nil {
			return nil, err
		}
	}
	if format != repb.Command_DIRECTORY_ONLY {
		data := encodeTree(blobs)
		if err := s.check(data, &repb.Tree{}); err != nil {
			return nil, err
		}
		d, err := b.AddBytes(ctx, f, data)
		if err != nil {
			return nil, err
		}
		out.TreeDigest, out.IsTopologicallySorted = d.Proto(), true
	}
	return out, nil
}

// encodeTree returns the Tree of the Directories blobs, root first. It consists of the records that
// is_topologically_sorted requires: tag, length, message.
func encodeTree(blobs []cas.Blob) []byte {
	const root, child = 1<<3 | 2, 2<<3 | 2
	var b []byte
	tag := byte(root)
	for _, d := range blobs {
		b = append(b, tag)
		b = binary.AppendUvarint(b, uint64(len(d.Data)))
		b = append(b, d.Data...)
		tag = child
	}
	return b
}

// putDirectories adds the Directories blobs to b, unless one is too large to be read back.
func (s *scanner) putDirectories(ctx context.Context, b *cas.Batch, blobs []cas.Blob) error {
	for _, d := range blobs {
		if err := s.check(d.Data, &repb.Directory{}); err != nil {
			return err
		}
	}
	for _, d := range blobs {
		if err := b.Add(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// check returns an error if b, an encoded message of m's type, is too large to be read back.
func (s *scanner) check(b []byte, m proto.Message) error {
	if err := cas.CheckMessage(b, m); err != nil {
		return s.errorf("too many entries: %v", err)
	}
	return nil
}
