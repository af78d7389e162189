// SPDX-License-Identifier: Apache-2.0

// Square matrices of exact fractions.
#ifndef EXAMPLES_NUM_MATRIX_H_
#define EXAMPLES_NUM_MATRIX_H_

#include <vector>

#include "examples/num/rational.h"

namespace num {

using Matrix = std::vector<std::vector<Rational>>;

// Returns a * b; both are n by n.
Matrix Multiply(const Matrix& a, const Matrix& b);

// Returns the determinant of m, which is n by n.
Rational Determinant(Matrix m);

}  // namespace num

#endif  // EXAMPLES_NUM_MATRIX_H_
