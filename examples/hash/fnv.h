// SPDX-License-Identifier: Apache-2.0

// A hash for tables.
#ifndef EXAMPLES_HASH_FNV_H_
#define EXAMPLES_HASH_FNV_H_

#include <cstdint>
#include <string_view>

namespace hash {

// Returns the FNV-1a hash of s.
constexpr uint64_t Fnv(std::string_view s) {
  uint64_t h = 0xCBF29CE484222325;
  for (char c : s) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return h;
}

}  // namespace hash

#endif  // EXAMPLES_HASH_FNV_H_
