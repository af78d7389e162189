// SPDX-License-Identifier: Apache-2.0

// Reads expressions.
#ifndef EXAMPLES_CALC_PARSER_H_
#define EXAMPLES_CALC_PARSER_H_

#include <string>
#include <string_view>

#include "examples/calc/ast.h"

namespace calc {

// Returns the tree of s. If s is no expression, returns nullptr and says in *error what is wrong.
Tree Parse(std::string_view s, std::string* error);

}  // namespace calc

#endif  // EXAMPLES_CALC_PARSER_H_
