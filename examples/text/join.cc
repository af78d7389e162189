// SPDX-License-Identifier: Apache-2.0

#include "examples/text/join.h"

namespace text {

std::string Join(const std::vector<std::string_view>& parts, std::string_view sep) {
  std::string all;
  for (size_t i = 0; i < parts.size(); i++) {
    if (i > 0) all += sep;
    all += parts[i];
  }
  return all;
}

}  // namespace text
