// SPDX-License-Identifier: Apache-2.0

// Makes any bytes printable.
#ifndef EXAMPLES_TEXT_ESCAPE_H_
#define EXAMPLES_TEXT_ESCAPE_H_

#include <string>
#include <string_view>

namespace text {

// Returns s as a C string literal, quotes included.
std::string Quote(std::string_view s);

}  // namespace text

#endif  // EXAMPLES_TEXT_ESCAPE_H_
