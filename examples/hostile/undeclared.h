// SPDX-License-Identifier: Apache-2.0

// A header in the source tree that no target declares.
#ifndef EXAMPLES_HOSTILE_UNDECLARED_H_
#define EXAMPLES_HOSTILE_UNDECLARED_H_

constexpr int kUndeclared = 1;

#endif  // EXAMPLES_HOSTILE_UNDECLARED_H_
