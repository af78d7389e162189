// SPDX-License-Identifier: Apache-2.0

package disk

// Maintain runs the periodic maintenance once.
func (c *Cache) Maintain() { c.maintainOnce() }
