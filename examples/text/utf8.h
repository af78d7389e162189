// SPDX-License-Identifier: Apache-2.0

// UTF-8, strictly: no overlong forms, no surrogates.
#ifndef EXAMPLES_TEXT_UTF8_H_
#define EXAMPLES_TEXT_UTF8_H_

#include <cstdint>
#include <string_view>

namespace text {

// Removes the first code point of s and returns it, or removes one byte and returns -1.
int32_t TakeRune(std::string_view* s);

// Reports whether s is valid.
bool ValidUtf8(std::string_view s);

// Returns the number of code points in s; an invalid byte counts as one.
int CountRunes(std::string_view s);

}  // namespace text

#endif  // EXAMPLES_TEXT_UTF8_H_
