// SPDX-License-Identifier: Apache-2.0

#include "examples/num/bits.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(num::RotateLeft(0x8000000000000001u, 1), 3u);
  CHECK_EQ(num::RotateLeft(5, 0), 5u);
  CHECK_EQ(num::CountOnes(~uint64_t{0}), 64);
  CHECK(num::IsPowerOfTwo(64) && !num::IsPowerOfTwo(0) && !num::IsPowerOfTwo(12));
  return check::Failures();
}
