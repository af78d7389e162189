// SPDX-License-Identifier: Apache-2.0

// Pseudorandom numbers that are the same on every machine.
#ifndef EXAMPLES_NUM_RANDOM_H_
#define EXAMPLES_NUM_RANDOM_H_

#include <cstdint>

namespace num {

// A Random is xoshiro256**, seeded by splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed);
  uint64_t Next();
  // Returns a uniformly distributed number below n; n must not be 0.
  uint64_t Below(uint64_t n);

 private:
  uint64_t state_[4];
};

}  // namespace num

#endif  // EXAMPLES_NUM_RANDOM_H_
