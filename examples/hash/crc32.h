// SPDX-License-Identifier: Apache-2.0

// The checksum of zip and PNG.
#ifndef EXAMPLES_HASH_CRC32_H_
#define EXAMPLES_HASH_CRC32_H_

#include <cstdint>
#include <string_view>

namespace hash {

// Returns the CRC-32 of s, or of earlier data with the CRC-32 crc followed by s.
uint32_t Crc32(std::string_view s, uint32_t crc = 0);

}  // namespace hash

#endif  // EXAMPLES_HASH_CRC32_H_
