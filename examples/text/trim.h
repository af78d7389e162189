// SPDX-License-Identifier: Apache-2.0

// Removes space around text.
#ifndef EXAMPLES_TEXT_TRIM_H_
#define EXAMPLES_TEXT_TRIM_H_

#include <string_view>

namespace text {

// Returns s without leading and trailing white space, as a view of s.
std::string_view Trim(std::string_view s);

}  // namespace text

#endif  // EXAMPLES_TEXT_TRIM_H_
