// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"compress/bzip2"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
)

func unpackBzip2(r io.Reader) (io.ReadCloser, error) { return io.NopCloser(bzip2.NewReader(r)), nil }

func unpackXz(r io.Reader) (io.ReadCloser, error) {
	d, err := xz.NewReader(r, maxUnpacked) // xz -9 needs as much
	if err != nil {
		return nil, err
	}
	return io.NopCloser(d), nil
}

func unpackZstd(r io.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUnpacked),
		zstd.WithDecoderMaxWindow(32<<20), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// comparePacked compares the unpacked contents of a and b, or adds that only the compression differs.
func comparePacked(c *comparison, a, b *io.SectionReader, unpacker func(io.Reader) (io.ReadCloser, error)) error {
	const name = "contents"
	x, err := unpacker(a)
	if err != nil {
		return err
	}
	ra := &untilEnd{x}
	defer ra.Close()
	if x, err = unpacker(b); err != nil {
		return err
	}
	rb := &untilEnd{x}
	defer rb.Close()
	before := c.found.added
	if err := c.descendUnpacked(name, ra, a.Size(), rb, b.Size()); err != nil {
		return c.skipTooMuch(name, err)
	}
	if c.found.added == before {
		c.differ("compression, of the same contents", fmt.Sprint(a.Size(), " bytes"), fmt.Sprint(b.Size(), " bytes"),
			-1, Unknown)
	}
	return nil
}

// An untilEnd closes and forgets a decoder when it ends: its dictionary is large, and what it unpacked may contain
// compressed files in turn.
type untilEnd struct{ decoder io.ReadCloser }

func (u *untilEnd) Read(p []byte) (int, error) {
	if u.decoder == nil {
		return 0, io.EOF
	}
	n, err := u.decoder.Read(p)
	if err != nil {
		_ = u.Close() // the error of Read counts
	}
	return n, err
}

func (u *untilEnd) Close() error {
	d := u.decoder
	if u.decoder = nil; d == nil {
		return nil
	}
	return d.Close()
}

// descendUnpacked reads two unpacking readers into memory and compares their contents.
func (c *comparison) descendUnpacked(name string, a io.Reader, packedA int64, b io.Reader, packedB int64) error {
	dataA, release, err := c.unpack(a, packedA)
	if err != nil {
		return err
	}
	defer release()
	dataB, release, err := c.unpack(b, packedB)
	if err != nil {
		return err
	}
	defer release()
	return c.descend(name, section(dataA), section(dataB))
}
