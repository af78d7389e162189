// SPDX-License-Identifier: Apache-2.0

#include "examples/store/bitset.h"

#include "examples/check/check.h"

int main() {
  store::Bitset set;
  for (uint32_t n : {0, 63, 64, 1000, 64}) set.Add(n);
  CHECK(set.Has(0) && set.Has(63) && set.Has(64) && set.Has(1000));
  CHECK(!set.Has(1) && !set.Has(1001) && !set.Has(4000000000));
  CHECK_EQ(set.Size(), 4);
  return check::Failures();
}
