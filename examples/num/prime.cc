// SPDX-License-Identifier: Apache-2.0

#include "examples/num/prime.h"

namespace num {

std::vector<int64_t> Factor(int64_t n) {
  std::vector<int64_t> primes;
  for (int64_t p = 2; p <= n / p; p++) {
    for (; n % p == 0; n /= p) primes.push_back(p);
  }
  if (n > 1) primes.push_back(n);
  return primes;
}

bool IsPrime(int64_t n) { return Factor(n).size() == 1; }

}  // namespace num
