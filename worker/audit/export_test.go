// SPDX-License-Identifier: Apache-2.0

package audit

// SetSegmentBytes sets the maximum size of a segment.
func (l *Log) SetSegmentBytes(n int64) { l.maxSegment = n }

// MaxLine bounds a line.
const MaxLine = maxLine

// SetStep sets a function that is called between the steps of a rotation.
func (c *Config) SetStep(f func(name string)) { c.step = f }
