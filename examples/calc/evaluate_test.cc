// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/evaluate.h"

#include "examples/check/check.h"

namespace {

double Value(const char* s, double x) {
  double result = -1;
  std::string error;
  CHECK(calc::Evaluate(s, x, &result, &error));
  return result;
}

}  // namespace

int main() {
  CHECK_EQ(Value("1 + 2 * 3", 0), 7.0);
  CHECK_EQ(Value("x * x - 1", 5), 24.0);
  CHECK_EQ(Value("-(2 - mean(x, 4))", 2), 1.0);
  CHECK_EQ(Value("8 / 2 / 2", 0), 2.0);
  return check::Failures();
}
