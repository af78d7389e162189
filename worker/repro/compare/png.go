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

// comparePNG compares images by chunks: times, texts and the unpacked image data.
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

// pngChunks returns the chunks of an image without lengths and checksums. The name of a text chunk includes its
// keyword. Adjacent chunks of image data, which encoders split anywhere, form one piece that still contains their
// lengths.
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
		from := off
		off += 8 + size + 4
		switch last := len(chunks) - 1; {
		case kind == "tEXt" || kind == "zTXt" || kind == "iTXt":
			keyword, _, _ := bytes.Cut(head[8:min(len(head), 8+int(min(size, 80)))], []byte{0})
			kind += " " + string(keyword)
		case kind == "IDAT" && last >= 0 && chunks[last].name == kind:
			chunks[last].data = io.NewSectionReader(r, images, off-images)
			continue
		case kind == "IDAT":
			images = from
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
		year := binary.BigEndian.Uint16(t)
		texts[i] = fmt.Sprintf("%04d-%02d-%02d %02d:%02d:%02d UTC", year, t[2], t[3], t[4], t[5], t[6])
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
			rest := bytes.SplitN(text[2:], []byte{0}, 3) // language, translated keyword, text
			text = rest[len(rest)-1]
		} else if packed && len(text) > 0 {
			text = text[1:]
		}
		if packed {
			text, release, err = c.inflate(text)
			if err != nil {
				return err
			}
			defer release()
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

// inflate unpacks zlib data.
func (c *comparison) inflate(packed []byte) (data []byte, release func(), err error) {
	z, err := zlib.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, nil, err
	}
	return c.load(z, int64(len(packed)))
}

// pngImages compares the image data unpacked, as filtered lines of the image.
func (c *comparison) pngImages(a, b piece) error {
	return c.withBytes(fromStart(a.data), fromStart(b.data), func(x, y []byte) error {
		x, release, err := c.inflate(imageData(x))
		if err != nil {
			return err
		}
		defer release()
		y, release, err = c.inflate(imageData(y))
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
	})
}

// imageData removes lengths, types and checksums from adjacent IDAT chunks.
func imageData(chunks []byte) []byte {
	var data []byte
	for len(chunks) >= 8 {
		end := min(8+int(binary.BigEndian.Uint32(chunks)), len(chunks))
		data = append(data, chunks[8:end]...)
		chunks = chunks[min(end+4, len(chunks)):]
	}
	return data
}
