// SPDX-License-Identifier: Apache-2.0

// Package sha256tree implements the digest function SHA256TREE of the Remote Execution API: a binary Merkle tree over
// leaves of 1024 bytes, hashed with SHA-256 (remote_execution.proto, DigestFunction.SHA256TREE).
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

// New returns a hash. It holds one leaf and one hash for each doubling of its input, and is not safe for concurrent
// use.
func New() hash.Hash { return &tree{parent: newParent()} }

type tree struct {
	// whole holds the hashes of complete subtrees from left to right, each at least twice as large as the next: their
	// sizes are the bits of leaves.
	whole  [][Size]byte
	leaves uint64
	// last is the input after whole, and not empty unless all the input is. A full leaf stays here until more
	// follows, since neither half of a tree is empty.
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

// push appends a leaf other than the last, and joins subtrees of equal size.
func (t *tree) push(h [Size]byte) {
	for size := t.leaves; size&1 == 1; size >>= 1 {
		left := t.whole[len(t.whole)-1]
		t.whole = t.whole[:len(t.whole)-1]
		h = t.parent.hash(&left, &h)
	}
	t.whole = append(t.whole, h)
	t.leaves++
}

// Sum implements hash.Hash.
func (t *tree) Sum(b []byte) []byte {
	h := sha256.Sum256(t.last[:t.n])
	for i := len(t.whole) - 1; i >= 0; i-- {
		h = t.parent.hash(&t.whole[i], &h)
	}
	return append(b, h[:]...)
}

// Reset implements hash.Hash.
func (t *tree) Reset() { t.whole, t.leaves, t.n = t.whole[:0], 0, 0 }

// Size implements hash.Hash.
func (t *tree) Size() int { return Size }

// BlockSize implements hash.Hash.
func (t *tree) BlockSize() int { return leaf }

// initial is the initial state for inner nodes: from the square roots of the 9th to the 16th prime.
var initial = [8]uint32{0xcbbb9d5d, 0x629a292a, 0x9159015a, 0x152fecd8, 0x67332667, 0x8eb44a87, 0xdb0c2e0d, 0x47b5481d}

// A parent hashes inner nodes with the block function of SHA-256. The standard library exposes that function only
// through Write: set a hash to the initial state, write one block, read the state, and subtract the initial state that
// SHA-256 adds at the end of a block.
type parent struct {
	sha   hash.Hash
	state []byte // encoding of a new hash with the state initial
	after []byte // buffer
}

// stateAt is the offset of the state in the encoding of crypto/sha256, after a magic number.
const stateAt = 4

func newParent() *parent {
	p := &parent{sha: sha256.New()}
	state, err := p.sha.(encoding.BinaryAppender).AppendBinary(nil)
	if err != nil {
		panic(err) // never fails
	}
	p.state = state
	for i, word := range initial {
		binary.BigEndian.PutUint32(p.state[stateAt+4*i:], word)
	}
	return p
}

// hash returns the hash of the node with these children.
func (p *parent) hash(left, right *[Size]byte) (h [Size]byte) {
	if err := p.sha.(encoding.BinaryUnmarshaler).UnmarshalBinary(p.state); err != nil {
		panic(err) // crypto/sha256 wrote it
	}
	p.sha.Write(left[:])
	p.sha.Write(right[:])
	after, err := p.sha.(encoding.BinaryAppender).AppendBinary(p.after[:0])
	if err != nil {
		panic(err)
	}
	p.after = after
	for i, word := range initial {
		binary.BigEndian.PutUint32(h[4*i:], binary.BigEndian.Uint32(after[stateAt+4*i:])-word)
	}
	return h
}
