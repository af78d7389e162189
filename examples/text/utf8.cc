// SPDX-License-Identifier: Apache-2.0

#include "examples/text/utf8.h"

namespace text {

int32_t TakeRune(std::string_view* s) {
  if (s->empty()) return -1;
  const unsigned char lead = s->front();
  const size_t length =
      lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  int32_t rune = length == 1 ? lead : lead & (0xFF >> (length + 1));
  bool ok = length > 0 && length <= s->size();
  for (size_t i = 1; ok && i < length; i++) {
    const unsigned char c = (*s)[i];
    ok = (c & 0xC0) == 0x80;
    rune = rune << 6 | (c & 0x3F);
  }
  ok = ok && !(length == 3 && (rune < 0x800 || (rune >= 0xD800 && rune < 0xE000)));
  ok = ok && !(length == 4 && (rune < 0x10000 || rune > 0x10FFFF));
  s->remove_prefix(ok ? length : 1);
  return ok ? rune : -1;
}

bool ValidUtf8(std::string_view s) {
  while (!s.empty()) {
    if (TakeRune(&s) < 0) return false;
  }
  return true;
}

int CountRunes(std::string_view s) {
  int n = 0;
  for (; !s.empty(); n++) TakeRune(&s);
  return n;
}

}  // namespace text
