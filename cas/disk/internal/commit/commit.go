// SPDX-License-Identifier: Apache-2.0

// Package commit names the moments at which a crash would tell whether a store is safe. Point does nothing, unless
// the program was built with the tag commitpoints, for the test that dies at each of them.
package commit
