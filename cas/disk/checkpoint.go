// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/disk/internal/fault"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
	"github.com/cloister-build/cloister/cas/durable"
)

// A checkpoint contains the state of the earlier process that Open needs and cannot derive from the logs: its clock and
// the lengths of the logs. DIR/checkpoint holds it as text:
//
//	clock 1767225600 until 1767226620 uptime 86400 boot b0d5f7c6-…
//	log 1 3456 3400
//	end
//
// A file without its last line is ignored. Seconds count from 1970. A log has a number, a length, and the length of its
// durable part; see segment.Segment.Length. "clock" is when the checkpoint was written; the process made no stamps
// later than "until".
type checkpoint struct {
	at, until int64 // 0 if unknown
	uptime    int64
	boot      string
	logs      map[uint32]logLength
}

type logLength struct{ all, durable uint32 }

func (c *Cache) checkpointPath() string { return filepath.Join(c.dir, "checkpoint") }

// readCheckpoint reads the checkpoint. If it cannot be read, it is empty, and only jumps of the clock and truncated
// logs go unnoticed.
func (c *Cache) readCheckpoint() (checkpoint, error) {
	b, err := durable.ReadFile(c.checkpointPath())
	switch {
	case fault.Unreadable(err):
		c.config.Log.Warn("the checkpoint of the store cannot be read; truncated logs would go unnoticed", "err", err)
		return checkpoint{}, nil
	case vanished(err):
		return checkpoint{}, nil
	case err != nil:
		return checkpoint{}, err
	}
	p, ok := parseCheckpoint(string(b))
	if !ok {
		c.config.Log.Warn("the checkpoint of the store is damaged; truncated logs would go unnoticed", "file", c.checkpointPath())
	}
	return p, nil
}

func parseCheckpoint(text string) (checkpoint, bool) {
	p := checkpoint{logs: map[uint32]logLength{}}
	body, ok := strings.CutSuffix(text, "end\n")
	if !ok {
		return checkpoint{}, false
	}
	for i, line := range strings.Split(strings.TrimSuffix(body, "\n"), "\n") {
		if i == 0 {
			_, err := fmt.Sscanf(line, "clock %d until %d uptime %d boot %s", &p.at, &p.until, &p.uptime, &p.boot)
			if err != nil {
				return checkpoint{}, false
			}
			continue
		}
		var n uint32
		var l logLength
		if _, err := fmt.Sscanf(line, "log %d %d %d", &n, &l.all, &l.durable); err != nil {
			return checkpoint{}, false
		}
		p.logs[n] = l
	}
	return p, true
}

// saveCheckpoint writes the checkpoint if the logs have changed or the old one expires. It omits the logs of segments
// for which omit returns true.
func (c *Cache) saveCheckpoint(omit func(*segment.Segment) bool) error {
	c.saving.Lock()
	defer c.saving.Unlock()
	var logs bytes.Buffer
	for _, g := range c.segments.Segments() {
		if all, durable := g.Length(); !omit(g) {
			fmt.Fprintf(&logs, "log %d %d %d\n", g.N, all, durable)
		}
	}
	logs.WriteString("end\n")
	now, interval := int64(c.now()), max(c.grain, int64(maintainInterval/time.Second))
	if bytes.Equal(logs.Bytes(), c.saved) && now < c.savedAt+interval {
		return nil
	}
	// Two ticks, because writing may take long.
	until := now + interval + 2*int64(maintainInterval/time.Second)
	boot := thisBoot()
	if boot == "" {
		boot = "unknown"
	}
	clock := fmt.Sprintf("clock %d until %d uptime %d boot %s\n", now, until, uptime(), boot)
	if err := replaceFile(c.checkpointPath(), clock+logs.String()); err != nil {
		return err
	}
	c.saved, c.savedAt = logs.Bytes(), now
	return nil
}

// saveNow writes the checkpoint. If that fails, only the time of the last one counts.
func (c *Cache) saveNow() {
	c.saving.Lock()
	c.saved = nil
	c.saving.Unlock()
	c.noted(c.saveCheckpoint(omitNone))
}

// beginCheckpoint replaces or removes the checkpoint of the earlier process, which is wrong for this process.
func (c *Cache) beginCheckpoint() error {
	err := c.saveCheckpoint(omitNone)
	if err == nil {
		return nil
	}
	if e := os.Remove(c.checkpointPath()); e != nil && !vanished(e) {
		return err
	}
	return nil
}

func omitNone(*segment.Segment) bool { return false }
