// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

const (
	pngMagic  = "\x89PNG\r\n\x1a\n"
	maxChunks = 1 << 16
)

var errNotPNG = errors.New("not a PNG file, or a damaged one")

func isPNG(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte(pngMagic)) }

// comparePNG compares images by their chunks: times and texts in their words, and the image as it is unpacked.
//
// Source: PNG (Third Edition), chapters 5 and 11.
func comparePNG(c *comparison, a, b *io.SectionReader) error {
	chunksA, err := pngChunks(a)
	if err != nil {
		return err
	}
	chunksB, err := pngChunks(b)
	if err != nil {
		return err
	}
	return c.pieces("chunk", chunksA, chunksB, func(a, b piece) error {
		kind, keyword, _ := strings.Cut(a.name, " ")
		switch kind {
		case "tIME":
			return c.pngTimes(a, b)
		case "tEXt", "zTXt", "iTXt":
			return c.pngTexts(kind, keyword, a, b)
		case "IDAT":
			return c.pngImages(a, b)
		}
		return c.pieceContents(a, b)
	})
}

// pngChunks returns the chunks of an image without their lengths and checksums, those of texts with their keywords in
// the name, and those of image data, which follow each other and are cut anywhere, as one.
func pngChunks(r *io.SectionReader) ([]piece, error) {
	var chunks []piece
	images := int64(0)
	for off := int64(len(pngMagic)); off < r.Size(); {
		if len(chunks) == maxChunks {
			return nil, fmt.Errorf("%w: more than %d chunks", errNotPNG, maxChunks)
		}
		head, err := window(r, off, 8+80)
		if err != nil {
			return nil, err
		}
		if len(head) < 8 || int64(binary.BigEndian.Uint32(head)) > r.Size()-off-8 {
			return nil, fmt.Errorf("%w: chunk at byte %d", errNotPNG, off)
		}
		size := int64(binary.BigEndian.Uint32(head))
		kind, data := string(head[4:8]), io.NewSectionReader(r, off+8, size)
		off += 8 + size + 4
		switch n := len(chunks) - 1; {
		case kind == "tEXt" || kind == "zTXt" || kind == "iTXt":
			keyword, _, _ := bytes.Cut(head[8:min(len(head), 8+int(min(size, 80)))], []byte{0})
			kind += " " + string(keyword)
		case kind == "IDAT" && n >= 0 && chunks[n].name == kind:
			chunks[n].data = io.NewSectionReader(r, images, off-images)
			continue
		case kind == "IDAT":
			images = off - 4 - size - 8 // with its head: imageData reads the next ones too
			data = io.NewSectionReader(r, images, off-images)
		}
		chunks = append(chunks, piece{kind, data})
	}
	return chunks, nil
}

func (c *comparison) pngTimes(a, b piece) error {
	var texts [2]string
	for i, p := range []piece{a, b} {
		t, err := window(p.data, 0, 7)
		if err != nil || len(t) < 7 {
			return errors.Join(err, errNotPNG)
		}
		texts[i] = fmt.Sprintf("%04d-%02d-%02d %02d:%02d:%02d UTC", binary.BigEndian.Uint16(t), t[2], t[3], t[4], t[5], t[6])
	}
	c.differ("time", texts[0], texts[1], 0, Timestamp, a.name)
	return nil
}

func (c *comparison) pngTexts(kind, keyword string, a, b piece) error {
	var texts [2]string
	for i, p := range []piece{a, b} {
		data, release, err := c.load(fromStart(p.data), p.data.Size())
		if err != nil {
			return err
		}
		defer release()
		_, text, _ := bytes.Cut(data, []byte{0})
		packed := kind == "zTXt"
		if kind == "iTXt" && len(text) > 2 {
			packed = text[0] == 1
			rest := bytes.SplitN(text[2:], []byte{0}, 3) // language, keyword in that language, text
			text = rest[len(rest)-1]
		} else if packed && len(text) > 0 {
			text = text[1:]
		}
		if packed {
			if text, err = c.inflate(text); err != nil {
				return err
			}
		}
		texts[i] = string(text)
	}
	cause := c.textCause(texts[0], texts[1])
	if cause == Unknown && (strings.HasPrefix(keyword, "date:") || keyword == "Creation Time") {
		cause = Timestamp
	}
	c.differ("text", texts[0], texts[1], int64(commonPrefix(texts[0], texts[1])), cause, a.name)
	return nil
}

// inflate unpacks a small text.
func (c *comparison) inflate(packed []byte) ([]byte, error) {
	z, err := zlib.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	data, release, err := c.load(z, int64(len(packed)))
	if err != nil {
		return nil, err
	}
	release()
	return data, nil
}

// pngImages compares the image data as it is unpacked, in filtered lines of the image.
func (c *comparison) pngImages(a, b piece) error {
	za, err := zlib.NewReader(&imageData{r: a.data})
	if err != nil {
		return err
	}
	zb, err := zlib.NewReader(&imageData{r: b.data})
	if err != nil {
		return err
	}
	x, release, err := c.load(za, a.data.Size())
	if err != nil {
		return err
	}
	defer release()
	y, release, err := c.load(zb, b.data.Size())
	if err != nil {
		return err
	}
	defer release()
	if bytes.Equal(x, y) {
		c.differ("compression of the image", "", "", -1, Unknown, a.name)
	} else {
		c.contents(x, y, "image data, unpacked")
	}
	return nil
}

// imageData reads what the chunks of image data hold that begin at the beginning of r.
type imageData struct {
	r    *io.SectionReader
	off  int64
	left int64
}

func (d *imageData) Read(p []byte) (int, error) {
	for d.left == 0 {
		head, err := window(d.r, d.off, 8)
		if err != nil {
			return 0, err
		}
		if len(head) < 8 || string(head[4:]) != "IDAT" {
			return 0, io.EOF
		}
		d.left = int64(binary.BigEndian.Uint32(head))
		d.off += 8
		if d.left == 0 {
			d.off += 4
		}
	}
	n, err := d.r.ReadAt(p[:min(int64(len(p)), d.left)], d.off)
	d.off, d.left = d.off+int64(n), d.left-int64(n)
	if d.left == 0 {
		d.off += 4 // the checksum
	}
	if n > 0 {
		err = nil
	}
	return n, err
}
