// SPDX-License-Identifier: Apache-2.0

// The functions of expressions.
#ifndef EXAMPLES_CALC_FUNCTIONS_H_
#define EXAMPLES_CALC_FUNCTIONS_H_

#include <string>
#include <string_view>

namespace calc {

// A Function maps two numbers to one.
struct Function {
  std::string_view name;
  double (*call)(double, double);
};

// Returns the number of the function called name, or -1.
int FindFunction(std::string_view name);

// Returns the function with a number from FindFunction.
const Function& FunctionOf(int number);

// Returns the known name most similar to name.
std::string_view Suggest(std::string_view name);

}  // namespace calc

#endif  // EXAMPLES_CALC_FUNCTIONS_H_
