// SPDX-License-Identifier: Apache-2.0

// The check digit of card numbers.
#ifndef EXAMPLES_HASH_LUHN_H_
#define EXAMPLES_HASH_LUHN_H_

#include <string_view>

namespace hash {

// Reports whether s has at least two digits and the last is the correct check digit.
bool ValidLuhn(std::string_view s);

}  // namespace hash

#endif  // EXAMPLES_HASH_LUHN_H_
