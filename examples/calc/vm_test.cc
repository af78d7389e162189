// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/vm.h"

#include "examples/check/check.h"

int main() {
  using namespace calc;
  CHECK_EQ(Run({{kLoad}, {kPush, 3}, {kSubtract}}, 10), 7.0);
  CHECK_EQ(Run({{kPush, 8}, {kLoad}, {kNegate}, {kDivide}}, 2), -4.0);
  return check::Failures();
}
