// SPDX-License-Identifier: Apache-2.0

// Edit distance.
#ifndef EXAMPLES_TEXT_DISTANCE_H_
#define EXAMPLES_TEXT_DISTANCE_H_

#include <string_view>

namespace text {

// Returns the least number of insertions, deletions and replacements that turn a into b.
int Distance(std::string_view a, std::string_view b);

}  // namespace text

#endif  // EXAMPLES_TEXT_DISTANCE_H_
