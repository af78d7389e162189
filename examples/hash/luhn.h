// SPDX-License-Identifier: Apache-2.0

// The check digit of card numbers.
#ifndef EXAMPLES_HASH_LUHN_H_
#define EXAMPLES_HASH_LUHN_H_

#include <string_view>

namespace hash {

// Reports whether s is at least two digits, of which the last is right.
bool ValidLuhn(std::string_view s);

}  // namespace hash

#endif  // EXAMPLES_HASH_LUHN_H_
