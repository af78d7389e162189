// SPDX-License-Identifier: Apache-2.0

// Bytes as hexadecimal digits.
#ifndef EXAMPLES_HASH_HEX_H_
#define EXAMPLES_HASH_HEX_H_

#include <string>
#include <string_view>

namespace hash {

// Returns two lower-case digits for each byte of s.
std::string ToHex(std::string_view s);

// Decodes s into *out. Returns false and leaves *out unchanged if s does not consist of pairs of digits.
bool FromHex(std::string_view s, std::string* out);

}  // namespace hash

#endif  // EXAMPLES_HASH_HEX_H_
