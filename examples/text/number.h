// SPDX-License-Identifier: Apache-2.0

// Decimal numbers, whatever the locale.
#ifndef EXAMPLES_TEXT_NUMBER_H_
#define EXAMPLES_TEXT_NUMBER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace text {

// Parses all of s as a decimal number with an optional sign. Returns false and leaves *n unchanged if s
// is anything else or does not fit.
bool ParseInt(std::string_view s, int64_t* n);

// Parses all of s as digits with an optional sign and at most one point.
bool ParseDecimal(std::string_view s, double* x);

// Returns x with at most six digits after the point and no trailing zeros.
std::string FormatDecimal(double x);

}  // namespace text

#endif  // EXAMPLES_TEXT_NUMBER_H_
