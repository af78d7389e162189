// SPDX-License-Identifier: Apache-2.0

package audit

// SetSegmentBytes makes segments smaller, before the first Append.
func (l *Log) SetSegmentBytes(n int64) { l.maximum = n }

// MaxLine is how long a line may be.
const MaxLine = maxLine

// SetReached has f called between the steps of a rotation.
func (c *Config) SetReached(f func(step string)) { c.reached = f }
