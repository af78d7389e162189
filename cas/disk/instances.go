// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/commit"
	"github.com/cloister-build/cloister/cas/durable"
)

// instances maps the names of instances to the numbers by which entries refer to them.
type instances struct {
	mu        sync.RWMutex
	numbers   map[string]uint16 // guarded by mu
	byEscaped map[string]uint16 // guarded by mu; by escaped name
	names     []string          // guarded by mu; by number
	log       *durable.Log      // guarded by mu; DIR/instances: NUMBER "NAME"
}

// open reads the names. The caller calls close, also if open fails.
func (in *instances) open(dir string) (err error) {
	in.numbers, in.byEscaped = map[string]uint16{}, map[string]uint16{}
	in.log, err = durable.Open(durable.Config{
		Path: filepath.Join(dir, "instances"), Sync: true,
		Replay: func(line []byte) error {
			number, quoted, _ := strings.Cut(string(line), " ")
			name, err := strconv.Unquote(quoted)
			if err != nil || number != strconv.Itoa(len(in.names)) {
				return fmt.Errorf("damaged: %.80q", line) // the numbers of later names would shift
			}
			// The name is not checked: a word in it may have been reserved since. Instance refuses it.
			in.add(name)
			return nil
		},
	})
	return err
}

func (in *instances) close() error {
	if in.log == nil {
		return nil
	}
	return in.log.Close()
}

// find returns the number of the instance, if it has one.
func (in *instances) find(name string) (uint16, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	n, ok := in.numbers[name]
	return n, ok
}

// findEscaped returns the number of the instance with this escaped name.
func (in *instances) findEscaped(name string) (uint16, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	n, ok := in.byEscaped[name]
	return n, ok
}

// name returns the name of instance n.
func (in *instances) name(n uint16) (string, bool) {
	in.mu.RLock()
	defer in.mu.RUnlock()
	if int(n) >= len(in.names) {
		return "", false
	}
	return in.names[n], true
}

// number returns the number of the instance, and assigns one if it has none. The assignment survives a power failure
// before any entry can refer to it.
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
		return 0, fmt.Errorf("the store has %d instances, its maximum: %w", len(in.names), cas.ErrFull)
	}
	if err := in.log.Append(fmt.Appendf(nil, "%d %s", len(in.names), strconv.QuoteToASCII(name))); err != nil {
		return 0, err
	}
	commit.Point("instance named")
	return in.add(name), nil
}

// add assigns the next number to name. The caller holds mu or has exclusive access.
func (in *instances) add(name string) uint16 {
	n := uint16(len(in.names))
	in.numbers[name], in.byEscaped[escape(name)] = n, n
	in.names = append(in.names, name)
	return n
}
