// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/base64.h"

#include <cstdint>

namespace hash {

std::string ToBase64(std::string_view s) {
  constexpr char kAlphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (; !s.empty(); s.remove_prefix(s.size() < 3 ? s.size() : 3)) {
    uint32_t group = 0;
    for (size_t i = 0; i < 3; i++) group = group << 8 | (i < s.size() ? static_cast<unsigned char>(s[i]) : 0);
    for (size_t i = 0; i < 4; i++) out += i <= s.size() ? kAlphabet[group >> (18 - 6 * i) & 63] : '=';
  }
  return out;
}

}  // namespace hash
