// SPDX-License-Identifier: Apache-2.0

#include "examples/num/random.h"

#include "examples/num/bits.h"

namespace num {

Random::Random(uint64_t seed) {
  for (uint64_t& word : state_) {
    uint64_t z = seed += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    word = z ^ z >> 31;
  }
}

uint64_t Random::Next() {
  const uint64_t result = RotateLeft(state_[1] * 5, 7) * 9;
  const uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = RotateLeft(state_[3], 45);
  return result;
}

uint64_t Random::Below(uint64_t n) {
  // Reject numbers below 2^64 mod n, which would make small remainders more frequent.
  const uint64_t skip = -n % n;
  for (;;) {
    if (const uint64_t x = Next(); x >= skip) return x % n;
  }
}

}  // namespace num
