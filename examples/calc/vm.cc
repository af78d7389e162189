// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/vm.h"

#include "examples/calc/functions.h"

namespace calc {

double Run(const Code& code, double x) {
  std::vector<double> stack;
  const auto pop = [&] {
    const double top = stack.back();
    stack.pop_back();
    return top;
  };
  for (const Instruction& i : code) {
    if (i.opcode == kPush || i.opcode == kLoad) {
      stack.push_back(i.opcode == kPush ? i.number : x);
      continue;
    }
    const double b = pop();
    if (i.opcode == kNegate) {
      stack.push_back(-b);
      continue;
    }
    const double a = pop();
    switch (i.opcode) {
      case kAdd:
        stack.push_back(a + b);
        break;
      case kSubtract:
        stack.push_back(a - b);
        break;
      case kMultiply:
        stack.push_back(a * b);
        break;
      case kDivide:
        stack.push_back(a / b);
        break;
      default:
        stack.push_back(FunctionOf(i.function).call(a, b));
    }
  }
  return stack.back();
}

}  // namespace calc
