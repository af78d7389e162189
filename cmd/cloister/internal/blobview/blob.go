// SPDX-License-Identifier: Apache-2.0

// Package blobview reads blobs and input trees for the pages of the console, in bounded memory and time. Names, texts
// and messages are hostile: what it returns contains no control characters, but it is not escaped for HTML.
package blobview

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Limits of what a page reads and shows of a blob, in bytes unless another unit is given.
const (
	MaxShown   = 256 << 10 // of a text
	maxHex     = 4 << 10
	maxMessage = 16 << 20
	maxArchive = 256 << 20 // of an archive whose members are listed
	MaxRows    = 1000      // entries of a directory, members of an archive, fields of a message
)

// The kinds of blobs, of which a link may request one. Response is an ExecuteResponse, and Historical Buildbarn's
// message that contains one.
const (
	Action     = "action"
	Command    = "command"
	Directory  = "directory"
	Tree       = "tree"
	Result     = "result"
	Response   = "response"
	Historical = "historical_execute_response"
	Text       = "text"
	Binary     = "binary"
)

// Kinds lists the kinds.
var Kinds = []string{Action, Command, Directory, Tree, Result, Response, Historical, Text, Binary}

// A Blob is what a page shows of a blob.
type Blob struct {
	Digest cas.Digest `json:"digest"`
	Kind   string     `json:"kind"`
	Format string     `json:"format,omitempty"` // of a text or binary
	// Entries are those of a Directory or of the root of a Tree, Fields those of another message.
	Entries []Entry `json:"entries,omitempty"`
	Fields  []Field `json:"fields,omitempty"`
	// Lines are those of a text, Dump is the hex dump of the first bytes of a binary, and Members are those of an archive.
	Lines   []string         `json:"lines,omitempty"`
	Dump    []string         `json:"dump,omitempty"`
	Members []compare.Member `json:"members,omitempty"`
	// Note says what is not shown.
	Note string `json:"note,omitempty"`
}

// A Field is a part of a message, with a link to the blob that it names.
type Field struct {
	Name  string     `json:"name"`
	Value string     `json:"value"`
	Blob  cas.Digest `json:"blob,omitzero"`
	Kind  string     `json:"kind,omitempty"` // of Blob
}

// Read reads a blob as kind or, if that is empty, as what it appears to be. It returns the errors of cas.Store.Open,
// and cas.ErrInvalid for a blob that is not such a message.
func Read(ctx context.Context, s cas.Store, d cas.Digest, kind string) (*Blob, error) {
	b := &Blob{Digest: d, Kind: kind}
	if kind != "" && !slices.Contains(Kinds, kind) {
		return nil, fmt.Errorf("%w: unknown kind of blob %+.40q: use one of %v", cas.ErrInvalid, kind, Kinds)
	}
	if kind == "" || kind == Text || kind == Binary {
		return b, b.content(ctx, s)
	}
	if d.Size() > maxMessage {
		return nil, fmt.Errorf("%w: %s is too large to be shown as %s; download it", cas.ErrInvalid, d, kind)
	}
	data, err := cas.ReadAll(ctx, s, d, maxMessage)
	if err != nil {
		return nil, err
	}
	return b, b.message(data)
}

// note adds a sentence to b.Note.
func (b *Blob) note(format string, args ...any) {
	b.Note = strings.TrimPrefix(b.Note+"; "+fmt.Sprintf(format, args...), "; ")
}

// content shows the first bytes of the blob, or the message that it appears to be.
func (b *Blob) content(ctx context.Context, s cas.Store) error {
	const guessed = 1 << 20 // larger blobs are messages only if a link says so
	size := b.Digest.Size()
	most := int64(MaxShown)
	if b.Kind == "" && size <= guessed {
		most = guessed
	}
	head, err := readHead(ctx, s, b.Digest, min(size, most))
	if err != nil {
		return err
	}
	b.Format = compare.FormatOf(head)
	text := b.Format == "text" || b.Format == "json" || size == 0
	if b.Kind == "" && int64(len(head)) == size && size > 0 {
		if b.Kind = comparison.MessageKind(head, b.Digest.Function()); b.Kind != "" {
			b.Format = ""
			return b.message(head)
		}
	}
	if b.Kind == Text || b.Kind == "" && text {
		return b.text(head)
	}
	b.Kind = Binary
	shown := head[:min(len(head), maxHex)]
	b.Dump = dump(shown)
	if int64(len(shown)) < size {
		b.note("the first %s of %s", sandbox.Bytes(int64(len(shown))), sandbox.Bytes(size))
	}
	return b.members(ctx, s)
}

// text shows the lines of head.
func (b *Blob) text(head []byte) (err error) {
	head = head[:min(len(head), MaxShown)]
	whole := false
	b.Kind = Text
	if b.Lines, whole = lines(head); !whole || int64(len(head)) < b.Digest.Size() {
		b.note("at most %d lines of %s each, of the first %s of %s", maxLines, sandbox.Bytes(maxLine),
			sandbox.Bytes(int64(len(head))), sandbox.Bytes(b.Digest.Size()))
	}
	return nil
}

// archives limits the copies of archives on disk.
var archives = make(chan struct{}, 1)

// members lists the members of an archive. Failures are no error: the hex dump is shown anyway.
func (b *Blob) members(ctx context.Context, s cas.Store) error {
	switch b.Format {
	case "ar", "deb", "cpio", "tar", "jar", "epub", "wheel", "zip":
	default:
		return nil
	}
	select {
	case archives <- struct{}{}:
		defer func() { <-archives }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var all []compare.Member
	in, done, err := (&changes.Reader{Store: s, MaxCopy: maxArchive}).Open(ctx, b.Digest)
	if err == nil {
		defer done()
		all, err = compare.Members(ctx, in)
	}
	if errors.Is(err, changes.ErrTooLarge) {
		b.note("members are listed of archives up to %s", sandbox.Bytes(maxArchive))
		return nil
	} else if err != nil {
		b.note("its members cannot be listed: %s", Visible(err.Error()))
		return ctx.Err()
	}
	if len(all) > MaxRows {
		b.note("the first %d of %d members", MaxRows, len(all))
		all = all[:MaxRows]
	}
	for i := range all {
		all[i].Name = Visible(all[i].Name)
		for j, f := range all[i].Fields {
			all[i].Fields[j] = Visible(f)
		}
	}
	b.Members = all
	return nil
}

// message shows the message in data.
func (b *Blob) message(data []byte) error {
	f := fields{function: b.Digest.Function()}
	decode := func(m proto.Message) error {
		_, err := cas.DecodeSized(data, b.Digest, m)
		return err
	}
	var err error
	switch b.Kind {
	case Directory, Tree:
		root := &repb.Directory{}
		if b.Kind == Tree {
			m := &repb.Tree{}
			err = decode(m)
			root = m.GetRoot()
			b.note("%d directories below the root", len(m.GetChildren()))
		} else {
			err = decode(root)
		}
		if err == nil {
			b.Entries, err = entriesOf(b.Digest.Function(), root, "")
		}
		if n := len(b.Entries); n > MaxRows {
			b.Entries = b.Entries[:MaxRows]
			b.note("the first %d of %d entries", MaxRows, n)
		}
	case Action:
		var m repb.Action
		err = decode(&m)
		f.action(&m)
	case Command:
		var m repb.Command
		err = decode(&m)
		f.command(&m)
	case Result:
		var m repb.ActionResult
		err = decode(&m)
		f.result(&m)
	case Response, Historical:
		if b.Kind == Historical {
			data, err = f.historical(data)
		}
		var m repb.ExecuteResponse
		if err == nil {
			err = decode(&m)
		}
		f.response(&m)
	}
	if n := len(f.all); n > MaxRows {
		f.all = f.all[:MaxRows]
		b.note("the first %d of %d fields", MaxRows, n)
	}
	b.Fields = f.all
	return err
}

// historical shows the action of a buildbarn.cas.HistoricalExecuteResponse (action_digest = 1, execute_response = 3)
// and returns the encoded response.
func (f *fields) historical(data []byte) (response []byte, err error) {
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 || kind != protowire.BytesType {
			return nil, fmt.Errorf("%w: not a HistoricalExecuteResponse", cas.ErrInvalid)
		}
		value, m := protowire.ConsumeBytes(data[n:])
		if m < 0 {
			return nil, fmt.Errorf("%w: not a HistoricalExecuteResponse", cas.ErrInvalid)
		}
		data = data[n+m:]
		switch number {
		case 1:
			var d repb.Digest
			if err := proto.Unmarshal(value, &d); err != nil {
				return nil, fmt.Errorf("%w: not a HistoricalExecuteResponse", cas.ErrInvalid)
			}
			f.blob("action", &d, Action)
		case 3:
			response = value
		}
	}
	return response, nil
}

// readHead returns the first n bytes of a blob, without reading the rest.
func readHead(ctx context.Context, s cas.Store, d cas.Digest, n int64) ([]byte, error) {
	r, err := s.Open(ctx, d, 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	head := make([]byte, n)
	if _, err := io.ReadFull(r, head); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read blob %s: %w", d, err)
	}
	return head, nil
}
