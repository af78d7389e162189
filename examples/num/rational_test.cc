// SPDX-License-Identifier: Apache-2.0

#include "examples/num/rational.h"

#include "examples/check/check.h"

using num::Rational;

int main() {
  CHECK_EQ(Rational(6, -8).Text(), "-3/4");
  CHECK_EQ((Rational(1, 3) + Rational(1, 6)).Text(), "1/2");
  CHECK_EQ((Rational(1, 3) - Rational(1, 3)).Text(), "0");
  CHECK(Rational(2, 3) * Rational(3, 2) == 1);
  CHECK(Rational(2, 3) / Rational(-2, 3) == -1);
  return check::Failures();
}
