// SPDX-License-Identifier: Apache-2.0

// Words of bits.
#ifndef EXAMPLES_NUM_BITS_H_
#define EXAMPLES_NUM_BITS_H_

#include <cstdint>

namespace num {

constexpr uint64_t RotateLeft(uint64_t x, int n) { return x << (n & 63) | x >> (-n & 63); }

// Returns the number of ones in x.
constexpr int CountOnes(uint64_t x) {
  int n = 0;
  for (; x != 0; x &= x - 1) n++;
  return n;
}

constexpr bool IsPowerOfTwo(uint64_t x) { return x != 0 && (x & (x - 1)) == 0; }

}  // namespace num

#endif  // EXAMPLES_NUM_BITS_H_
