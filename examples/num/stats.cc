// SPDX-License-Identifier: Apache-2.0

#include "examples/num/stats.h"

#include <algorithm>

namespace num {

double Mean(const std::vector<double>& xs) {
  double sum = 0;
  for (double x : xs) sum += x;
  return xs.empty() ? 0 : sum / xs.size();
}

double Variance(const std::vector<double>& xs) {
  const double mean = Mean(xs);
  double sum = 0;
  for (double x : xs) sum += (x - mean) * (x - mean);
  return xs.empty() ? 0 : sum / xs.size();
}

double Median(std::vector<double> xs) {
  if (xs.empty()) return 0;
  std::sort(xs.begin(), xs.end());
  const size_t half = xs.size() / 2;
  return xs.size() % 2 == 1 ? xs[half] : (xs[half - 1] + xs[half]) / 2;
}

}  // namespace num
