// SPDX-License-Identifier: Apache-2.0

// Statistics of a list of numbers.
#ifndef EXAMPLES_NUM_STATS_H_
#define EXAMPLES_NUM_STATS_H_

#include <vector>

namespace num {

// Each returns 0 for no numbers.
double Mean(const std::vector<double>& xs);
double Variance(const std::vector<double>& xs);
double Median(std::vector<double> xs);

}  // namespace num

#endif  // EXAMPLES_NUM_STATS_H_
