// SPDX-License-Identifier: Apache-2.0

// File name patterns.
#ifndef EXAMPLES_TEXT_GLOB_H_
#define EXAMPLES_TEXT_GLOB_H_

#include <string_view>

namespace text {

// Reports whether all of s matches pattern, where * is any text and ? any one character.
bool Glob(std::string_view pattern, std::string_view s);

}  // namespace text

#endif  // EXAMPLES_TEXT_GLOB_H_
