// SPDX-License-Identifier: Apache-2.0

#include "examples/text/glob.h"

namespace text {

bool Glob(std::string_view pattern, std::string_view s) {
  // Only the last star needs to be remembered: an earlier one can always stay as short as it is.
  size_t p = 0, i = 0, star = pattern.npos, resume = 0;
  while (i < s.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = i;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == s[i])) {
      p++, i++;
    } else if (star != pattern.npos) {
      p = star + 1;
      i = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') p++;
  return p == pattern.size();
}

}  // namespace text
