// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/luhn.h"

#include "examples/text/ascii.h"

namespace hash {

bool ValidLuhn(std::string_view s) {
  int sum = 0;
  for (size_t i = 0; i < s.size(); i++) {
    const char c = s[s.size() - 1 - i];
    if (!text::IsDigit(c)) return false;
    const int digit = (c - '0') << (i % 2);
    sum += digit > 9 ? digit - 9 : digit;
  }
  return s.size() > 1 && sum % 10 == 0;
}

}  // namespace hash
