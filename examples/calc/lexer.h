// SPDX-License-Identifier: Apache-2.0

// Cuts an expression into tokens.
#ifndef EXAMPLES_CALC_LEXER_H_
#define EXAMPLES_CALC_LEXER_H_

#include <string_view>

#include "examples/calc/token.h"

namespace calc {

// Removes the first token of *s and returns it; at the end, returns the end token each time.
Token TakeToken(std::string_view* s);

}  // namespace calc

#endif  // EXAMPLES_CALC_LEXER_H_
