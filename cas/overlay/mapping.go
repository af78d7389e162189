// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"cmp"
	"context"

	"github.com/cloister-build/cloister/cas"
)

// A mapper makes a store a cas.Splicer, whose near is one. Far need not know of chunks: it has the chunks that were put,
// as any other blobs, and the whole beside them, so that whoever else uses it finds the whole.
type mapper struct {
	s    *store
	near cas.Splicer
}

// withMapper returns st, which is a form of s, as a cas.Splicer too if near is one.
func (s *store) withMapper(st cas.Store) cas.Store {
	near, ok := cas.As[cas.Splicer](s.near.Store)
	if !ok {
		return st
	}
	m := &mapper{s, near}
	switch st := st.(type) {
	case *placing:
		return struct {
			*placing
			*mapper
		}{st, m}
	case *filing:
		return struct {
			*filing
			*mapper
		}{st, m}
	}
	return struct {
		*store
		*mapper
	}{s, m}
}

// Splice implements cas.Splicer: near keeps the chunks' list, and far the whole, now or, under Back, later. Chunks that are
// not near are brought there. Near forgets nothing if far cannot be written, and the same call can be made again.
func (m *mapper) Splice(ctx context.Context, d cas.Digest, of cas.ChunkList) error {
	if err := cmp.Or(m.s.unserved(d), of.Check(d)); err != nil {
		return err
	}
	absent, err := m.s.near.Store.Missing(ctx, of.Chunks)
	if err != nil {
		return err
	}
	own, others := m.s.fetch(ctx, absent, map[cas.Digest]bool{})
	if err := cmp.Or(ctx.Err(), own, others); err != nil && !lacks(err) {
		return err
	}
	if err := m.near.Splice(ctx, d, of); err != nil || d.IsEmpty() {
		return err
	}
	m.s.brought(d, nil)
	if m.s.o.config.Policy == WriteBack {
		return m.s.o.pending.add(entry{blob, m.s.name, d})
	}
	return m.s.send(ctx, []cas.Digest{d})[d]
}

// Split implements cas.Splicer: what near keeps.
func (m *mapper) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	return m.near.Split(ctx, d)
}
