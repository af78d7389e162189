// SPDX-License-Identifier: Apache-2.0

// Character classes of ASCII, whatever the locale.
#ifndef EXAMPLES_TEXT_ASCII_H_
#define EXAMPLES_TEXT_ASCII_H_

namespace text {

constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }
constexpr bool IsLower(char c) { return c >= 'a' && c <= 'z'; }
constexpr bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }
constexpr bool IsLetter(char c) { return IsLower(c) || IsUpper(c); }
constexpr bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
constexpr char ToLower(char c) { return IsUpper(c) ? c - 'A' + 'a' : c; }
constexpr char ToUpper(char c) { return IsLower(c) ? c - 'a' + 'A' : c; }

}  // namespace text

#endif  // EXAMPLES_TEXT_ASCII_H_
