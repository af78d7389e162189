// SPDX-License-Identifier: Apache-2.0

// Bytes as text, four characters for three bytes.
#ifndef EXAMPLES_HASH_BASE64_H_
#define EXAMPLES_HASH_BASE64_H_

#include <string>
#include <string_view>

namespace hash {

// Returns s in the standard alphabet, padded.
std::string ToBase64(std::string_view s);

}  // namespace hash

#endif  // EXAMPLES_HASH_BASE64_H_
