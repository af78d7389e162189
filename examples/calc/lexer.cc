// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/lexer.h"

#include "examples/text/ascii.h"
#include "examples/text/number.h"

namespace calc {
namespace {

// Returns the number of leading characters of s for which `is` holds.
template <typename Is>
size_t Span(std::string_view s, Is is) {
  size_t n = 0;
  while (n < s.size() && is(s[n])) n++;
  return n;
}

}  // namespace

Token TakeToken(std::string_view* s) {
  s->remove_prefix(Span(*s, text::IsSpace));
  if (s->empty()) return {};
  Token token;
  size_t length = 1;
  if (const size_t name = Span(*s, text::IsLetter); name > 0) {
    token.kind = 'a';
    length = name;
  } else if (const size_t digits = Span(*s, [](char c) { return text::IsDigit(c) || c == '.'; }); digits > 0) {
    token.kind = text::ParseDecimal(s->substr(0, digits), &token.number) ? 'n' : '?';
    length = digits;
  } else {
    token.kind = std::string_view("+-*/(),").find(s->front()) != s->npos ? s->front() : '?';
  }
  token.text = s->substr(0, length);
  s->remove_prefix(length);
  return token;
}

}  // namespace calc
