// SPDX-License-Identifier: Apache-2.0

// Package commit names the commit points of a store, at which a crash is most interesting. With the build tag
// commitpoints, a test can kill the process at each of them. Without it, Point does nothing.
package commit
