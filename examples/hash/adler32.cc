// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/adler32.h"

namespace hash {

uint32_t Adler32(std::string_view s) {
  constexpr uint32_t kPrime = 65521;  // the largest below 2^16
  uint32_t a = 1, b = 0;
  for (unsigned char c : s) {
    a = (a + c) % kPrime;
    b = (b + a) % kPrime;
  }
  return b << 16 | a;
}

}  // namespace hash
