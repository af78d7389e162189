// SPDX-License-Identifier: Apache-2.0

#include "examples/num/matrix.h"

#include <utility>

namespace num {

Matrix Multiply(const Matrix& a, const Matrix& b) {
  const size_t n = a.size();
  Matrix product(n, std::vector<Rational>(n));
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < n; j++)
      for (size_t k = 0; k < n; k++) product[i][j] = product[i][j] + a[i][k] * b[k][j];
  return product;
}

Rational Determinant(Matrix m) {
  Rational product = 1;
  for (size_t col = 0; col < m.size(); col++) {
    size_t pivot = col;
    while (pivot < m.size() && m[pivot][col] == 0) pivot++;
    if (pivot == m.size()) return 0;
    if (pivot != col) {
      std::swap(m[pivot], m[col]);
      product = product * -1;
    }
    product = product * m[col][col];
    for (size_t row = col + 1; row < m.size(); row++) {
      const Rational factor = m[row][col] / m[col][col];
      for (size_t k = col; k < m.size(); k++) m[row][k] = m[row][k] - factor * m[col][k];
    }
  }
  return product;
}

}  // namespace num
