// SPDX-License-Identifier: Apache-2.0

// Factors.
#ifndef EXAMPLES_NUM_PRIME_H_
#define EXAMPLES_NUM_PRIME_H_

#include <cstdint>
#include <vector>

namespace num {

// Returns the primes whose product is n, smallest first; nothing if n is below 2.
std::vector<int64_t> Factor(int64_t n);

bool IsPrime(int64_t n);

}  // namespace num

#endif  // EXAMPLES_NUM_PRIME_H_
