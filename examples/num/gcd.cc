// SPDX-License-Identifier: Apache-2.0

#include "examples/num/gcd.h"

namespace num {

int64_t Gcd(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a < 0 ? -a : a;
}

}  // namespace num
