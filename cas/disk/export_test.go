// SPDX-License-Identifier: Apache-2.0

package disk

// Maintain does at once what is else done every half minute.
func (c *Cache) Maintain() { c.maintainOnce() }
