// SPDX-License-Identifier: Apache-2.0

// Paragraphs.
#ifndef EXAMPLES_TEXT_WRAP_H_
#define EXAMPLES_TEXT_WRAP_H_

#include <string>
#include <string_view>

namespace text {

// Returns the words of s in lines of at most width code points; a longer word has a line of its own.
std::string Wrap(std::string_view s, int width);

}  // namespace text

#endif  // EXAMPLES_TEXT_WRAP_H_
