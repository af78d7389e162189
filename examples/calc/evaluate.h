// SPDX-License-Identifier: Apache-2.0

// From text to value.
#ifndef EXAMPLES_CALC_EVALUATE_H_
#define EXAMPLES_CALC_EVALUATE_H_

#include <string>
#include <string_view>

namespace calc {

// Evaluates s with the variable x to *result. If s is not an expression, returns false and sets *error.
bool Evaluate(std::string_view s, double x, double* result, std::string* error);

}  // namespace calc

#endif  // EXAMPLES_CALC_EVALUATE_H_
