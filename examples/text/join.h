// SPDX-License-Identifier: Apache-2.0

// Puts text together.
#ifndef EXAMPLES_TEXT_JOIN_H_
#define EXAMPLES_TEXT_JOIN_H_

#include <string>
#include <string_view>
#include <vector>

namespace text {

// Returns parts with sep between each two of them.
std::string Join(const std::vector<std::string_view>& parts, std::string_view sep);

}  // namespace text

#endif  // EXAMPLES_TEXT_JOIN_H_
