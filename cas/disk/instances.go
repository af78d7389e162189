// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// instances are the names of instances, and the numbers by which entries refer to them.
type instances struct {
	mu        sync.RWMutex
	numbers   map[string]uint16 // guarded by mu
	byEscaped map[string]uint16 // guarded by mu; by what escape makes of the name
	names     []string          // guarded by mu; by number
	file      string            // DIR/instances
	end       int64             // guarded by mu; where the file ends
}

// open reads the names. A last line that is torn is no name: nothing can refer to it yet.
func (in *instances) open(dir string) error {
	in.file, in.numbers = filepath.Join(dir, "instances"), map[string]uint16{}
	in.byEscaped = map[string]uint16{}
	b, err := os.ReadFile(in.file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for {
		line, rest, whole := bytes.Cut(b, []byte("\n"))
		if !whole {
			return nil
		}
		number, quoted, _ := strings.Cut(string(line), " ")
		name, err := strconv.Unquote(quoted)
		if err != nil || number != strconv.Itoa(len(in.names)) || cas.CheckInstanceName(name) != nil {
			return fmt.Errorf("%s: line %d is damaged: %.80q", in.file, len(in.names)+1, line)
		}
		in.learn(name)
		in.end += int64(len(line)) + 1
		b = rest
	}
}

// find returns the number of an instance that has one.
func (in *instances) find(name string) (uint16, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	n, ok := in.numbers[name]
	return n, ok
}

// name returns the name of a number.
func (in *instances) name(n uint16) (string, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	if int(n) >= len(in.names) {
		return "", false
	}
	return in.names[n], true
}

// number returns the number of an instance, which it gets if it has none. That outlives a loss of power before
// anything can refer to it.
func (in *instances) number(name string) (uint16, error) {
	if n, ok := in.find(name); ok {
		return n, nil
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if n, ok := in.numbers[name]; ok {
		return n, nil
	}
	if len(in.names) > math.MaxUint16 {
		return 0, fmt.Errorf("there are %d instances, and no room for another: %w", len(in.names), cas.ErrFull)
	}
	line := strconv.Itoa(len(in.names)) + " " + strconv.QuoteToASCII(name) + "\n"
	if err := in.append(line); err != nil {
		return 0, err
	}
	commit.Point("instance named")
	in.end += int64(len(line))
	return in.learn(name), nil
}

// learn gives name the next number. The caller holds mu, or is the only one.
func (in *instances) learn(name string) uint16 {
	n := uint16(len(in.names))
	in.numbers[name], in.byEscaped[escape(name)] = n, n
	in.names = append(in.names, name)
	return n
}

// append adds a line to the file. The caller holds mu.
func (in *instances) append(line string) (err error) {
	f, err := os.OpenFile(in.file, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(in.end); err != nil {
		return err
	}
	if _, err := f.WriteAt([]byte(line), in.end); err != nil {
		return err
	}
	if err := f.Sync(); err != nil || in.end > 0 {
		return err
	}
	return segment.SyncDir(filepath.Dir(in.file)) // the file is new
}

// escaped returns the number of the instance whose name escape writes so.
func (in *instances) escaped(name string) (uint16, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	n, ok := in.byEscaped[name]
	return n, ok
}
