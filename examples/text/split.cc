// SPDX-License-Identifier: Apache-2.0

#include "examples/text/split.h"

#include "examples/text/ascii.h"
#include "examples/text/trim.h"

namespace text {

std::vector<std::string_view> Split(std::string_view s, char sep) {
  std::vector<std::string_view> parts;
  for (size_t cut; (cut = s.find(sep)) != s.npos; s.remove_prefix(cut + 1)) parts.push_back(s.substr(0, cut));
  parts.push_back(s);
  return parts;
}

std::vector<std::string_view> Words(std::string_view s) {
  std::vector<std::string_view> words;
  for (s = Trim(s); !s.empty(); s = Trim(s)) {
    size_t n = 0;
    while (n < s.size() && !IsSpace(s[n])) n++;
    words.push_back(s.substr(0, n));
    s.remove_prefix(n);
  }
  return words;
}

}  // namespace text
