// SPDX-License-Identifier: Apache-2.0

#include "examples/text/trim.h"

#include "examples/text/ascii.h"

namespace text {

std::string_view Trim(std::string_view s) {
  while (!s.empty() && IsSpace(s.front())) s.remove_prefix(1);
  while (!s.empty() && IsSpace(s.back())) s.remove_suffix(1);
  return s;
}

}  // namespace text
