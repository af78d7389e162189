// SPDX-License-Identifier: Apache-2.0

#include "examples/num/rational.h"

#include "examples/num/gcd.h"

namespace num {

Rational::Rational(int64_t n, int64_t d) {
  const int64_t g = d < 0 ? -Gcd(n, d) : Gcd(n, d);
  n_ = n / g;
  d_ = d / g;
}

std::string Rational::Text() const {
  return d_ == 1 ? std::to_string(n_) : std::to_string(n_) + "/" + std::to_string(d_);
}

}  // namespace num
