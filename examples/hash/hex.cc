// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/hex.h"

namespace hash {
namespace {
constexpr std::string_view kDigits = "0123456789abcdef";
}

std::string ToHex(std::string_view s) {
  std::string hex;
  for (unsigned char c : s) hex += {kDigits[c >> 4], kDigits[c & 15]};
  return hex;
}

bool FromHex(std::string_view s, std::string* out) {
  if (s.size() % 2 != 0) return false;
  std::string bytes;
  for (size_t i = 0; i < s.size(); i += 2) {
    const size_t high = kDigits.find(s[i]), low = kDigits.find(s[i + 1]);
    if (high == kDigits.npos || low == kDigits.npos) return false;
    bytes += static_cast<char>(high << 4 | low);
  }
  *out = bytes;
  return true;
}

}  // namespace hash
