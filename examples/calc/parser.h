// SPDX-License-Identifier: Apache-2.0

// Reads expressions.
#ifndef EXAMPLES_CALC_PARSER_H_
#define EXAMPLES_CALC_PARSER_H_

#include <string>
#include <string_view>

#include "examples/calc/ast.h"

namespace calc {

// Returns the tree of s. If s is not an expression, returns nullptr and sets *error.
Tree Parse(std::string_view s, std::string* error);

}  // namespace calc

#endif  // EXAMPLES_CALC_PARSER_H_
