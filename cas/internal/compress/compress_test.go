// SPDX-License-Identifier: Apache-2.0

package compress_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/klauspost/compress/zstd"
)

// texts returns blobs of several kinds.
func texts() map[string][]byte {
	noise := make([]byte, 3<<20+1)
	rand.NewChaCha8([32]byte{}).Read(noise)
	return map[string][]byte{
		"empty": {}, "a byte": {'x'}, "text": []byte(strings.Repeat("to be or not to be; ", 1000)),
		"zeros": make([]byte, 5<<20), "noise": noise, "just large enough": bytes.Repeat([]byte("ab"), compress.MinSize/2),
	}
}

// pack returns data as one compressed stream.
func pack(t testing.TB, c repb.Compressor_Value, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := compress.NewWriter(c, &b)
	defer w.Release()
	must.Get(w.Write(data))(t)
	must.Succeed(t, w.Close())
	return b.Bytes()
}

// unpack decompresses b.
func unpack(c repb.Compressor_Value, b io.Reader) ([]byte, error) {
	r := compress.NewReader(c, b)
	defer r.Release()
	return io.ReadAll(r)
}

// each runs test for each compressor.
func each(t *testing.T, test func(t *testing.T, c repb.Compressor_Value)) {
	for _, c := range compress.Compressors() {
		t.Run(compress.Name(c), func(t *testing.T) { test(t, c) })
	}
}

func TestRoundTrip(t *testing.T) {
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		for name, data := range texts() {
			packed := pack(t, c, data)
			expect.That(t, len(packed) != 0, "%s: got no bytes, which some decoders reject", name)
			for way, r := range map[string]io.Reader{"at once": bytes.NewReader(packed), "in halves": iotest.HalfReader(bytes.NewReader(packed)), "with its end": iotest.DataErrReader(bytes.NewReader(packed))} {
				if got, err := unpack(c, r); err != nil || !bytes.Equal(got, data) {
					t.Errorf("%s %s: got %d bytes, %v, want %d", name, way, len(got), err, len(data))
				}
			}
			if got, err := compress.Decode(c, packed, int64(len(data))); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: Decode gave %d bytes, %v, want %d", name, len(got), err, len(data))
			}
			if b := compress.Encode(c, data); b != nil && len(b) >= len(data) {
				t.Errorf("%s: Encode gave %d bytes for %d", name, len(b), len(data))
			} else if (b != nil) != (name == "text" || name == "zeros" || name == "just large enough") {
				t.Errorf("%s: Encode gave %d bytes", name, len(b))
			}
		}
	})
}

func TestNamesAndOrder(t *testing.T) {
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		if got, err := compress.Parse(compress.Name(c)); got != c || err != nil || !compress.Supported(c) {
			t.Errorf("got %v, %v", got, err)
		}
	})
	for _, name := range []string{"", "identity", "ZSTD", "gzip", "z\xffstd"} {
		if _, err := compress.Parse(name); !errors.Is(err, cas.ErrInvalid) || !strings.Contains(err.Error(), compress.Names()) {
			t.Errorf("%q: got %v, want ErrInvalid with the supported ones", name, err)
		}
	}
	expect.That(t, !compress.Supported(repb.Compressor_IDENTITY) && compress.Names() == "zstd, brotli, deflate",
		"got %s", compress.Names())
}

func TestTruncatedAndTrailingDataIsInvalid(t *testing.T) {
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		data := texts()["text"]
		good := pack(t, c, data)
		for n := range good {
			if got, err := unpack(c, bytes.NewReader(good[:n])); err == nil && (n > 0 || len(got) > 0) || err != nil && !errors.Is(err, cas.ErrInvalid) {
				t.Fatalf("%d of %d bytes: got %d, %v, want ErrInvalid", n, len(good), len(got), err)
			}
			if _, err := compress.Decode(c, good[:n], int64(len(data))); !errors.Is(err, cas.ErrInvalid) {
				t.Fatalf("%d of %d bytes: Decode: %v, want ErrInvalid", n, len(good), err)
			}
		}
		for n := 1; n < 9; n++ {
			long := append(bytes.Clone(good), []byte("trailing")[:n]...)
			for way, r := range map[string]io.Reader{
				"at once":   bytes.NewReader(long),
				"bytewise":  iotest.OneByteReader(bytes.NewReader(long)),
				"after all": io.MultiReader(bytes.NewReader(good), bytes.NewReader(long[len(good):])),
			} {
				expect.Error(t, expect.Err(unpack(c, r)), cas.ErrInvalid, "%d trailing bytes, %s", n, way)
			}
			expect.Error(t, expect.Err(compress.Decode(c, long, int64(len(data)))), cas.ErrInvalid,
				"%d trailing bytes: Decode", n)
		}
		// A pooled decoder must work after a failure.
		if got, err := unpack(c, bytes.NewReader(good)); err != nil || !bytes.Equal(got, data) {
			t.Errorf("afterwards: got %d bytes, %v", len(got), err)
		}
	})
}

func TestZstdAcceptsSeveralFrames(t *testing.T) {
	c := repb.Compressor_ZSTD
	skippable := []byte{0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'a', 'b', 'c'}
	b := append(append(append(pack(t, c, []byte("one ")), skippable...), pack(t, c, nil)...), pack(t, c, []byte("two"))...)
	expect.Equal(t, string(must.Get(unpack(c, bytes.NewReader(b)))(t)), "one two")
	expect.Equal(t, string(must.Get(compress.Decode(c, b, 7))(t)), "one two", "Decode")
}

func TestZstdLimitsWindow(t *testing.T) {
	for size, valid := range map[int]bool{compress.MaxWindow: true, 2 * compress.MaxWindow: false} {
		var b bytes.Buffer
		e := must.Get(zstd.NewWriter(&b, zstd.WithWindowSize(size), zstd.WithSingleSegment(false)))(t)
		// Flush, so that the encoder does not know the size.
		if _, err := e.Write([]byte("little")); err != nil || e.Flush() != nil || e.Close() != nil {
			t.Fatal(err)
		}
		_, err := unpack(repb.Compressor_ZSTD, &b)
		if valid && err != nil || !valid && !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("window of %d bytes: %v", size, err)
		}
	}
}

func TestReaderReturnsErrorsOfSource(t *testing.T) {
	fault := errors.New("connection lost")
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		good := pack(t, c, texts()["text"])
		for _, n := range []int{0, 1, len(good) / 2, len(good)} {
			if _, err := unpack(c, io.MultiReader(bytes.NewReader(good[:n]), iotest.ErrReader(fault))); err != fault {
				t.Errorf("after %d of %d bytes: got %v", n, len(good), err)
			}
			if _, err := unpack(c, io.MultiReader(bytes.NewReader(good[:n]), iotest.ErrReader(io.ErrUnexpectedEOF))); err != io.ErrUnexpectedEOF {
				t.Errorf("after %d of %d bytes: got %v", n, len(good), err)
			}
		}
	})
}

func TestDecodeStopsAtStatedSize(t *testing.T) {
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		bomb := pack(t, c, make([]byte, 64<<20))
		for _, size := range []int64{0, 1, 1000} {
			expect.Error(t, expect.Err(compress.Decode(c, bomb, size)), cas.ErrInvalid)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		expect.That(t, expect.Err(compress.Decode(c, bomb, 1000)) != nil, "no error")
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 8<<20 {
			t.Errorf("a bomb of %d bytes took %d bytes of memory, want at most 8 MiB", len(bomb), n)
		}
	})
}

func TestReleaseAtAnyTime(t *testing.T) {
	each(t, func(t *testing.T, c repb.Compressor_Value) {
		data := texts()["zeros"]
		good := pack(t, c, data)
		for range 3 {
			r := compress.NewReader(c, bytes.NewReader(good))
			must.Get(io.ReadFull(r, make([]byte, 1000)))(t)
			r.Release()
			r.Release()
			if n, err := r.Read(make([]byte, 1)); n > 0 || err == nil {
				t.Errorf("a released Reader: got %d bytes, %v, want an error", n, err)
			}
			w := compress.NewWriter(c, io.Discard)
			must.Get(w.Write(data[:1000]))(t)
			w.Release()
			w.Release()
			if got, err := compress.Decode(c, pack(t, c, data), int64(len(data))); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("the next: got %d bytes, %v", len(got), err)
			}
		}
	})
}

// FuzzDecode checks that Decode and Reader agree, return at most the stated size, and reject everything else with
// ErrInvalid.
func FuzzDecode(f *testing.F) {
	for _, c := range compress.Compressors() {
		for _, data := range []string{"", "x", strings.Repeat("to be or not to be; ", 50)} {
			good := pack(f, c, []byte(data))
			f.Add(uint8(c), good, uint16(len(data)))
			f.Add(uint8(c), good[:len(good)/2], uint16(len(data)))
			f.Add(uint8(c), append(good, good...), uint16(2*len(data)))
			f.Add(uint8(c), append(good, "garbage"...), uint16(len(data)))
		}
	}
	f.Fuzz(func(t *testing.T, kind uint8, data []byte, size uint16) {
		all := compress.Compressors()
		c := all[int(kind)%len(all)]
		got, err := compress.Decode(c, data, int64(size))
		if err == nil && len(got) != int(size) || err != nil && !errors.Is(err, cas.ErrInvalid) {
			t.Fatalf("got %d bytes, %v, want %d or ErrInvalid", len(got), err, size)
		}
		r := compress.NewReader(c, iotest.OneByteReader(bytes.NewReader(data)))
		defer r.Release()
		streamed, streamErr := io.ReadAll(io.LimitReader(r, int64(size)+1))
		if same := streamErr == nil && len(streamed) == int(size); same != (err == nil) {
			t.Fatalf("got %d bytes, %v from Reader and %d, %v from Decode; want %d", len(streamed), streamErr, len(got), err, size)
		}
		must.Be(t, err != nil || bytes.Equal(got, streamed), "Reader and Decode returned different bytes")
	})
}

// windowed returns text as a frame with a window of size bytes, or without a window if size is 0.
func windowed(t *testing.T, size int, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	e, err := zstd.NewWriter(&b, zstd.WithWindowSize(max(size, zstd.MinWindowSize)), zstd.WithSingleSegment(size == 0))
	must.Succeed(t, err)
	if size == 0 {
		return e.EncodeAll([]byte(text), nil)
	}
	// Flush, so that the encoder does not know the size.
	if _, err := e.Write([]byte(text)); err != nil || e.Flush() != nil || e.Close() != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Batches contain many small blobs, and there may be thousands of them at once.
func TestDecodeAllocatesNoWindow(t *testing.T) {
	data := windowed(t, compress.MaxWindow, "little")
	must.Get(compress.Decode(repb.Compressor_ZSTD, data, 6))(t)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 10 {
		runtime.GC() // two collections empty the pools
		runtime.GC()
		if got, err := compress.Decode(repb.Compressor_ZSTD, data, 6); err != nil || string(got) != "little" {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	runtime.ReadMemStats(&after)
	if n := (after.TotalAlloc - before.TotalAlloc) / 10; n > 1<<20 {
		t.Errorf("6 bytes took %d bytes of memory, want at most 1 MiB", n)
	}
}

func TestAdmitReturnsAndEnforcesMemory(t *testing.T) {
	c := repb.Compressor_ZSTD
	for name, test := range map[string]struct {
		first, second []byte
		memory        int64
		valid         bool
	}{
		"level 3":           {windowed(t, 2<<20, "one "), windowed(t, 2<<20, "two"), 2 << 20, true},
		"level 19":          {windowed(t, 8<<20, "one "), windowed(t, 0, "two"), 8 << 20, true},
		"ultra":             {windowed(t, 32<<20, "one "), windowed(t, 2<<20, "two"), 32 << 20, true},
		"small frame first": {windowed(t, 0, "one "), windowed(t, 8<<20, "two"), 8 << 20, true},
		"larger later":      {windowed(t, 1<<20, "one "), windowed(t, 4<<20, "two"), 2 << 20, false},
		"much larger later": {windowed(t, 0, "one "), windowed(t, 32<<20, "two"), 8 << 20, false},
		"too large":         {windowed(t, 64<<20, "one "), nil, 32 << 20, false},
	} {
		all := append(test.first, test.second...)
		memory, reader := compress.Admit(c, all)
		expect.Equal(t, memory, test.memory, "%s: memory", name)
		r := reader(bytes.NewReader(all))
		got, err := io.ReadAll(r)
		if r.Release(); test.valid && (err != nil || string(got) != "one two") || !test.valid && !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	for _, head := range [][]byte{nil, windowed(t, 2<<20, "x")[:5], {0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'a', 'b', 'c'}} {
		if memory, _ := compress.Admit(c, head); memory != compress.MaxWindow {
			t.Errorf("%x: got memory %d, want the maximum", head, memory)
		}
	}
}
