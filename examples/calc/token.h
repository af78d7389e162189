// SPDX-License-Identifier: Apache-2.0

// The words of an expression.
#ifndef EXAMPLES_CALC_TOKEN_H_
#define EXAMPLES_CALC_TOKEN_H_

#include <string_view>

namespace calc {

// A Token is a number 'n', a name 'a', one of + - * / ( ) , as itself, the end 0, or an error '?'.
struct Token {
  char kind = 0;
  std::string_view text;
  double number = 0;
};

}  // namespace calc

#endif  // EXAMPLES_CALC_TOKEN_H_
