// SPDX-License-Identifier: Apache-2.0

#include "examples/text/wrap.h"

#include "examples/text/join.h"
#include "examples/text/split.h"
#include "examples/text/utf8.h"

namespace text {

std::string Wrap(std::string_view s, int width) {
  std::string lines;
  std::vector<std::string_view> line;
  int used = 0;
  for (std::string_view word : Words(s)) {
    const int length = CountRunes(word);
    if (!line.empty() && used + 1 + length > width) {
      lines += Join(line, " ") + '\n';
      line.clear();
    }
    used = line.empty() ? length : used + 1 + length;
    line.push_back(word);
  }
  return lines + Join(line, " ");
}

}  // namespace text
