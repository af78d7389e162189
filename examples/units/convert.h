// SPDX-License-Identifier: Apache-2.0

// Lengths, masses and times in many units.
#ifndef EXAMPLES_UNITS_CONVERT_H_
#define EXAMPLES_UNITS_CONVERT_H_

#include <string_view>

#include "examples/units/unit_names.h"

namespace units {

// Finds the unit called name. Returns false and leaves *unit unchanged if there is none.
bool Find(std::string_view name, Unit* unit);

// Converts x. Returns false and leaves *result unchanged if the units measure different things.
bool Convert(double x, Unit from, Unit to, double* result);

}  // namespace units

#endif  // EXAMPLES_UNITS_CONVERT_H_
