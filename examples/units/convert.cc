// SPDX-License-Identifier: Apache-2.0

#include "examples/units/convert.h"

namespace units {
namespace {

struct Info {
  std::string_view name;
  char measures;
  double factor;  // to metre, gram or second
};

constexpr Info kInfo[] = {
#include "examples/units/unit_factors.inc"
};

}  // namespace

bool Find(std::string_view name, Unit* unit) {
  for (int i = 0; i < kUnits; i++) {
    if (kInfo[i].name == name) {
      *unit = static_cast<Unit>(i);
      return true;
    }
  }
  return false;
}

bool Convert(double x, Unit from, Unit to, double* result) {
  if (kInfo[from].measures != kInfo[to].measures) return false;
  *result = x * kInfo[from].factor / kInfo[to].factor;
  return true;
}

}  // namespace units
