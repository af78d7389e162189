// SPDX-License-Identifier: Apache-2.0

// Package sha256tree is the digest function SHA256TREE of the Remote Execution API: a binary Merkle tree over pieces
// of 1024 bytes, whose leaves are plain SHA-256 (remote_execution.proto, DigestFunction.SHA256TREE).
package sha256tree

import (
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"hash"
)

const (
	// Size is the length of a hash in bytes.
	Size = sha256.Size
	leaf = 1024
)

// New returns a hash that holds one leaf and one hash for each doubling of what it has seen. As every hash.Hash it is
// not safe for concurrent use.
func New() hash.Hash { return &tree{parent: newParent()} }

type tree struct {
	// whole are the hashes of complete subtrees from left to right, each at least twice as large as the next:
	// their sizes are the bits of leaves.
	whole  [][Size]byte
	leaves uint64
	// last is what was written behind them: nothing only if nothing was written at all. The leaf that may be the
	// last one waits, since the two halves of a tree are never empty.
	last   [leaf]byte
	n      int
	parent *parent
}

// Write implements hash.Hash.
func (t *tree) Write(p []byte) (int, error) {
	written := len(p)
	for len(p) > 0 {
		if t.n == leaf {
			t.push(sha256.Sum256(t.last[:]))
			t.n = 0
		}
		n := copy(t.last[t.n:], p)
		t.n += n
		p = p[n:]
	}
	return written, nil
}

// push adds a leaf that is not the last, and joins subtrees of equal size.
func (t *tree) push(h [Size]byte) {
	for size := t.leaves; size&1 == 1; size >>= 1 {
		left := t.whole[len(t.whole)-1]
		t.whole = t.whole[:len(t.whole)-1]
		h = t.parent.of(&left, &h)
	}
	t.whole = append(t.whole, h)
	t.leaves++
}

// Sum implements hash.Hash.
func (t *tree) Sum(b []byte) []byte {
	h := sha256.Sum256(t.last[:t.n])
	for i := len(t.whole) - 1; i >= 0; i-- {
		h = t.parent.of(&t.whole[i], &h)
	}
	return append(b, h[:]...)
}

// Reset implements hash.Hash.
func (t *tree) Reset() { t.whole, t.leaves, t.n = t.whole[:0], 0, 0 }

// Size implements hash.Hash.
func (t *tree) Size() int { return Size }

// BlockSize implements hash.Hash.
func (t *tree) BlockSize() int { return leaf }

// initial is the state with which the block cipher makes a parent: from the square roots of the 9th to the 16th prime.
var initial = [8]uint32{0xcbbb9d5d, 0x629a292a, 0x9159015a, 0x152fecd8, 0x67332667, 0x8eb44a87, 0xdb0c2e0d, 0x47b5481d}

// A parent computes the hashes of inner nodes. The standard library gives its block function no other name than
// Write: so a hash is set to the initial state, is given one block, and is asked for its state, from which what
// SHA-256 adds at the end of a block is taken away.
type parent struct {
	hash  hash.Hash
	state []byte // as crypto/sha256 marshals a hash that has seen nothing, with the state initial
	after []byte
}

// Where crypto/sha256 puts the state into its encoding: behind four bytes that say which hash it is.
const stateAt = 4

func newParent() *parent {
	p := &parent{hash: sha256.New()}
	state, err := p.hash.(encoding.BinaryAppender).AppendBinary(nil)
	if err != nil {
		panic(err) // it never fails
	}
	p.state = state
	for i, word := range initial {
		binary.BigEndian.PutUint32(p.state[stateAt+4*i:], word)
	}
	return p
}

// of returns the hash of the tree whose halves have the hashes left and right.
func (p *parent) of(left, right *[Size]byte) (h [Size]byte) {
	if err := p.hash.(encoding.BinaryUnmarshaler).UnmarshalBinary(p.state); err != nil {
		panic(err) // it is what the same package has written
	}
	p.hash.Write(left[:])
	p.hash.Write(right[:])
	after, err := p.hash.(encoding.BinaryAppender).AppendBinary(p.after[:0])
	if err != nil {
		panic(err)
	}
	p.after = after
	for i, word := range initial {
		binary.BigEndian.PutUint32(h[4*i:], binary.BigEndian.Uint32(after[stateAt+4*i:])-word)
	}
	return h
}
