// SPDX-License-Identifier: Apache-2.0

// From text to value.
#ifndef EXAMPLES_CALC_EVALUATE_H_
#define EXAMPLES_CALC_EVALUATE_H_

#include <string>
#include <string_view>

namespace calc {

// Evaluates s, in which the variable is x, to *result. If s is no expression, returns false and says in
// *error what is wrong.
bool Evaluate(std::string_view s, double x, double* result, std::string* error);

}  // namespace calc

#endif  // EXAMPLES_CALC_EVALUATE_H_
