// SPDX-License-Identifier: Apache-2.0

// Package resourceusagepb is the generated code of package buildbarn.resourceusage: resource usage that Buildbarn's
// browser shows. It has only the messages that Cloister's results carry.
package resourceusagepb
