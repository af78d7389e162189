// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

// program returns the head of an ELF file with these program headers, each a type and a name.
func program(entries ...any) []byte {
	const size = 56
	b := make([]byte, 64+size*len(entries)/2)
	copy(b, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint64(b[32:], 64)
	le.PutUint16(b[54:], size)
	le.PutUint16(b[56:], uint16(len(entries)/2))
	for i := 0; i < len(entries); i += 2 {
		e, name := b[64+size*i/2:], entries[i+1].(string)
		le.PutUint32(e, uint32(entries[i].(int)))
		le.PutUint64(e[8:], uint64(len(b)))
		le.PutUint64(e[32:], uint64(len(name)))
		b = append(b, name...)
	}
	return b
}

func TestInterpreter(t *testing.T) {
	huge := program(3, "/lib/ld.so\x00")
	binary.LittleEndian.PutUint64(huge[64+32:], 1<<63)
	far := program(3, "/lib/ld.so\x00")
	binary.LittleEndian.PutUint64(far[32:], 1<<63)
	for _, c := range []struct{ name, file, want string }{
		{"empty", "", ""},
		{"text", "echo x\n", ""},
		{"script", "#!/bin/sh\necho\n", "/bin/sh"},
		{"script with an argument", "#! \t/usr/bin/env -S python3\n", "/usr/bin/env"},
		{"script without an end", "#!/bin/sh", "/bin/sh"},
		{"script that names nothing", "#!\n/bin/sh", ""},
		{"script with NUL", "#!/bin/sh\x00x\n", "/bin/sh"},
		{"long script", "#!" + strings.Repeat(" ", headBytes) + "/bin/sh", ""},
		{"ELF", string(program(6, "", 3, "/lib/ld.so\x00")), "/lib/ld.so"},
		{"static ELF", string(program(1, "x")), ""},
		{"cut ELF", string(program(3, "/lib/ld.so\x00")[:100]), ""},
		{"ELF with a huge name", string(huge), ""},
		{"ELF with a table that lies nowhere", string(far), ""},
		{"32 bits", "\x7fELF\x01\x01" + strings.Repeat("x", 100), ""},
	} {
		expect.Equal(t, interpreter(bytes.NewReader([]byte(c.file))), c.want, "%s", c.name)
	}
}

func FuzzInterpreter(f *testing.F) {
	f.Add([]byte("#!/bin/sh\n"))
	f.Add(program(3, "/lib/ld.so\x00"))
	f.Fuzz(func(t *testing.T, file []byte) {
		if got := interpreter(bytes.NewReader(file)); len(got) > 4096 || strings.Contains(got, "\x00") {
			t.Errorf("got %q", got)
		}
	})
}
