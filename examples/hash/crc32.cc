// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/crc32.h"

#include "examples/hash/crc32_table.h"

namespace hash {

uint32_t Crc32(std::string_view s, uint32_t crc) {
  crc = ~crc;
  for (unsigned char c : s) crc = kCrc32Table[(crc ^ c) & 0xFF] ^ crc >> 8;
  return ~crc;
}

}  // namespace hash
