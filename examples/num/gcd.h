// SPDX-License-Identifier: Apache-2.0

// Divisors.
#ifndef EXAMPLES_NUM_GCD_H_
#define EXAMPLES_NUM_GCD_H_

#include <cstdint>

namespace num {

// Returns the greatest common divisor of a and b, never negative; 0 only of 0 and 0.
int64_t Gcd(int64_t a, int64_t b);

}  // namespace num

#endif  // EXAMPLES_NUM_GCD_H_
