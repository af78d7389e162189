// SPDX-License-Identifier: Apache-2.0

#include "examples/num/random.h"

#include "examples/check/check.h"

int main() {
  num::Random a(42), b(42), c(43);
  const uint64_t first = a.Next();
  CHECK_EQ(first, b.Next());
  CHECK(first != c.Next());
  int seen[6] = {};
  for (int i = 0; i < 6000; i++) seen[a.Below(6)]++;
  for (int count : seen) CHECK(count > 800 && count < 1200);
  return check::Failures();
}
