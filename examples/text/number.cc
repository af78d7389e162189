// SPDX-License-Identifier: Apache-2.0

#include "examples/text/number.h"

#include <cstdio>

#include "examples/text/ascii.h"

namespace text {
namespace {

bool TakeSign(std::string_view* s) {
  if (s->empty() || (s->front() != '-' && s->front() != '+')) return false;
  const bool negative = s->front() == '-';
  s->remove_prefix(1);
  return negative;
}

}  // namespace

bool ParseInt(std::string_view s, int64_t* n) {
  const bool negative = TakeSign(&s);
  if (s.empty()) return false;
  int64_t v = 0;
  for (char c : s) {
    // The range has one more negative number, so sum up negatively.
    if (!IsDigit(c)) return false;
    if (__builtin_mul_overflow(v, 10, &v) || __builtin_sub_overflow(v, c - '0', &v)) return false;
  }
  if (!negative && __builtin_sub_overflow(0, v, &v)) return false;
  *n = v;
  return true;
}

bool ParseDecimal(std::string_view s, double* x) {
  const bool negative = TakeSign(&s);
  double v = 0, scale = 1;
  bool digits = false, point = false;
  for (char c : s) {
    if (c == '.' && !point) {
      point = true;
    } else if (IsDigit(c)) {
      digits = true;
      v = v * 10 + (c - '0');
      if (point) scale *= 10;
    } else {
      return false;
    }
  }
  if (!digits) return false;
  *x = (negative ? -v : v) / scale;
  return true;
}

std::string FormatDecimal(double x) {
  char buf[400];
  const int n = std::snprintf(buf, sizeof buf, "%.6f", x);
  std::string s(buf, n);
  s.erase(s.find_last_not_of('0') + 1);
  if (s.back() == '.') s.pop_back();
  return s == "-0" ? "0" : s;
}

}  // namespace text
