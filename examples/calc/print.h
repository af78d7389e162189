// SPDX-License-Identifier: Apache-2.0

// Writes trees.
#ifndef EXAMPLES_CALC_PRINT_H_
#define EXAMPLES_CALC_PRINT_H_

#include <string>

#include "examples/calc/ast.h"

namespace calc {

// Returns node as an expression with every operation in parentheses.
std::string Print(const Node& node);

}  // namespace calc

#endif  // EXAMPLES_CALC_PRINT_H_
