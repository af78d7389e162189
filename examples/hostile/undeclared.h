// SPDX-License-Identifier: Apache-2.0

// A header that is in the source tree and that no target declares.
#ifndef EXAMPLES_HOSTILE_UNDECLARED_H_
#define EXAMPLES_HOSTILE_UNDECLARED_H_

constexpr int kUndeclared = 1;

#endif  // EXAMPLES_HOSTILE_UNDECLARED_H_
