// SPDX-License-Identifier: Apache-2.0

// The checksum of zlib.
#ifndef EXAMPLES_HASH_ADLER32_H_
#define EXAMPLES_HASH_ADLER32_H_

#include <cstdint>
#include <string_view>

namespace hash {

uint32_t Adler32(std::string_view s);

}  // namespace hash

#endif  // EXAMPLES_HASH_ADLER32_H_
