// SPDX-License-Identifier: Apache-2.0

#include "examples/num/matrix.h"

#include "examples/check/check.h"

int main() {
  const num::Matrix m = {{0, 2, 1}, {3, 1, 0}, {1, 1, 1}};
  CHECK_EQ(num::Determinant(m).Text(), "-4");
  CHECK_EQ(num::Determinant(num::Multiply(m, m)).Text(), "16");
  CHECK_EQ(num::Determinant({{1, 2}, {2, 4}}).Text(), "0");
  CHECK_EQ(num::Determinant({}).Text(), "1");
  return check::Failures();
}
