// SPDX-License-Identifier: Apache-2.0

package gvisor

// ExplainProbe is explain, for tests.
var ExplainProbe = explain
