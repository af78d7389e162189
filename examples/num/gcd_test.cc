// SPDX-License-Identifier: Apache-2.0

#include "examples/num/gcd.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(num::Gcd(12, 18), 6);
  CHECK_EQ(num::Gcd(-12, 18), 6);
  CHECK_EQ(num::Gcd(0, 7), 7);
  CHECK_EQ(num::Gcd(0, 0), 0);
  return check::Failures();
}
