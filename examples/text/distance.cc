// SPDX-License-Identifier: Apache-2.0

#include "examples/text/distance.h"

#include <algorithm>
#include <vector>

namespace text {

int Distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j < row.size(); j++) row[j] = j;
  for (size_t i = 0; i < a.size(); i++) {
    int diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); j++) {
      const int replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace text
