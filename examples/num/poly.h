// SPDX-License-Identifier: Apache-2.0

// Polynomials in one variable.
#ifndef EXAMPLES_NUM_POLY_H_
#define EXAMPLES_NUM_POLY_H_

#include <string>
#include <vector>

#include "examples/num/rational.h"

namespace num {

// The coefficients of a polynomial, the constant first.
using Poly = std::vector<Rational>;

// Returns the value of p at x.
Rational Evaluate(const Poly& p, Rational x);

// Returns the polynomial of least degree with the value values[i] at x = i.
Poly Interpolate(const std::vector<Rational>& values);

}  // namespace num

#endif  // EXAMPLES_NUM_POLY_H_
