// SPDX-License-Identifier: Apache-2.0

// Bytes as hexadecimal digits.
#ifndef EXAMPLES_HASH_HEX_H_
#define EXAMPLES_HASH_HEX_H_

#include <string>
#include <string_view>

namespace hash {

// Returns two lower-case digits for each byte of s.
std::string ToHex(std::string_view s);

// Decodes s into *out; returns false, and leaves *out alone, if s is not pairs of digits.
bool FromHex(std::string_view s, std::string* out);

}  // namespace hash

#endif  // EXAMPLES_HASH_HEX_H_
