// SPDX-License-Identifier: Apache-2.0

// Package resourceusagepb is the Go code of package buildbarn.resourceusage: what Buildbarn's browser shows
// of the consumption of an action. It is generated, apart from this comment, and has those messages alone
// that a result of ours carries.
package resourceusagepb
