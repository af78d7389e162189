// SPDX-License-Identifier: Apache-2.0

#include "examples/num/stats.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(num::Mean({1, 2, 3, 6}), 3.0);
  CHECK_EQ(num::Variance({2, 4, 4, 4, 5, 5, 7, 9}), 4.0);
  CHECK_EQ(num::Median({9, 1, 5}), 5.0);
  CHECK_EQ(num::Median({4, 1}), 2.5);
  CHECK_EQ(num::Median({}), 0.0);
  return check::Failures();
}
