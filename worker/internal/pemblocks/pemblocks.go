// SPDX-License-Identifier: Apache-2.0

// Package pemblocks decodes PEM files and rejects damaged blocks.
package pemblocks

import (
	"bytes"
	"encoding/pem"
	"fmt"
)

// Decode returns the PEM blocks of text and ignores other text around them. A damaged block, which pem.Decode skips, is
// an error.
func Decode(text []byte) ([]*pem.Block, error) {
	begun := bytes.Count(text, []byte("-----BEGIN "))
	var blocks []*pem.Block
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		blocks, text = append(blocks, block), rest
	}
	if damaged := begun - len(blocks); damaged > 0 {
		return nil, fmt.Errorf("%d of %d PEM blocks are damaged or incomplete", damaged, begun)
	}
	return blocks, nil
}
