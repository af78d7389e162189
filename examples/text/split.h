// SPDX-License-Identifier: Apache-2.0

// Cuts text at separators.
#ifndef EXAMPLES_TEXT_SPLIT_H_
#define EXAMPLES_TEXT_SPLIT_H_

#include <string_view>
#include <vector>

namespace text {

// Returns the parts of s between occurrences of sep: always one more than there are separators.
std::vector<std::string_view> Split(std::string_view s, char sep);

// Returns the non-empty parts of s between white space.
std::vector<std::string_view> Words(std::string_view s);

}  // namespace text

#endif  // EXAMPLES_TEXT_SPLIT_H_
