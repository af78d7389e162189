// SPDX-License-Identifier: Apache-2.0

#include "examples/num/poly.h"

namespace num {

Rational Evaluate(const Poly& p, Rational x) {
  Rational y;
  for (size_t i = p.size(); i-- > 0;) y = y * x + p[i];
  return y;
}

Poly Interpolate(const std::vector<Rational>& values) {
  // Newton's form: each step adds a term that corrects the next value and keeps the earlier ones.
  Poly sum(values.size()), vanishing = {1};
  for (size_t i = 0; i < values.size(); i++) {
    const Rational x = static_cast<int64_t>(i);
    const Rational factor = (values[i] - Evaluate(sum, x)) / Evaluate(vanishing, x);
    for (size_t k = 0; k < vanishing.size(); k++) sum[k] = sum[k] + factor * vanishing[k];
    vanishing.insert(vanishing.begin(), 0);
    for (size_t k = 0; k + 1 < vanishing.size(); k++) vanishing[k] = vanishing[k] - x * vanishing[k + 1];
  }
  return sum;
}

}  // namespace num
