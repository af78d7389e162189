// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/box.h"

#include "examples/check/check.h"

int main() {
  const geometry::Box box = geometry::Around({3, 1}, {0, 4});
  CHECK(box.Contains({0, 1}) && box.Contains({3, 4}) && !box.Contains({4, 2}));
  CHECK(box.Meets(geometry::Around({3, 4}, {9, 9})));
  CHECK(!box.Meets(geometry::Around({4, 0}, {5, 9})));
  return check::Failures();
}
