// SPDX-License-Identifier: Apache-2.0

// Exact fractions.
#ifndef EXAMPLES_NUM_RATIONAL_H_
#define EXAMPLES_NUM_RATIONAL_H_

#include <cstdint>
#include <string>

namespace num {

// A Rational is n/d in lowest terms, d > 0.
class Rational {
 public:
  Rational(int64_t n = 0) : n_(n), d_(1) {}
  // d must not be 0.
  Rational(int64_t n, int64_t d);

  Rational operator+(Rational o) const { return {n_ * o.d_ + o.n_ * d_, d_ * o.d_}; }
  Rational operator-(Rational o) const { return {n_ * o.d_ - o.n_ * d_, d_ * o.d_}; }
  Rational operator*(Rational o) const { return {n_ * o.n_, d_ * o.d_}; }
  // o must not be 0.
  Rational operator/(Rational o) const { return {n_ * o.d_, d_ * o.n_}; }
  bool operator==(Rational o) const { return n_ == o.n_ && d_ == o.d_; }
  bool operator!=(Rational o) const { return !(*this == o); }

  // Returns "n" or "n/d".
  std::string Text() const;

 private:
  int64_t n_, d_;
};

}  // namespace num

#endif  // EXAMPLES_NUM_RATIONAL_H_
