// SPDX-License-Identifier: Apache-2.0

#include "examples/num/poly.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(num::Evaluate({1, 2, 3}, 2).Text(), "17");
  CHECK_EQ(num::Evaluate({}, 2).Text(), "0");
  // Sums of the first n numbers: n(n+1)/2.
  const num::Poly p = num::Interpolate({0, 1, 3, 6, 10});
  CHECK_EQ(p[1].Text(), "1/2");
  CHECK_EQ(p[3].Text(), "0");
  CHECK_EQ(num::Evaluate(p, 100).Text(), "5050");
  return check::Failures();
}
