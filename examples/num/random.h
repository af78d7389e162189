// SPDX-License-Identifier: Apache-2.0

// Numbers that look random and are the same everywhere.
#ifndef EXAMPLES_NUM_RANDOM_H_
#define EXAMPLES_NUM_RANDOM_H_

#include <cstdint>

namespace num {

// A Random is xoshiro256**, seeded by splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed);
  uint64_t Next();
  // Returns a number below n, which is not 0, each equally often.
  uint64_t Below(uint64_t n);

 private:
  uint64_t state_[4];
};

}  // namespace num

#endif  // EXAMPLES_NUM_RANDOM_H_
