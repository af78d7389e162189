// SPDX-License-Identifier: Apache-2.0

#include "examples/geometry/segment.h"

#include "examples/check/check.h"

using geometry::Segment;

int main() {
  const Segment s = {{0, 0}, {4, 4}};
  CHECK(s.Contains({2, 2}) && !s.Contains({5, 5}) && !s.Contains({2, 3}));
  CHECK(s.Meets(Segment{{0, 4}, {4, 0}}));
  CHECK(s.Meets(Segment{{4, 4}, {9, 0}}));
  CHECK(!s.Meets(Segment{{5, 5}, {6, 6}}));
  CHECK(!s.Meets(Segment{{0, 1}, {3, 4}}));
  return check::Failures();
}
