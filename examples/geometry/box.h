// SPDX-License-Identifier: Apache-2.0

// Upright rectangles.
#ifndef EXAMPLES_GEOMETRY_BOX_H_
#define EXAMPLES_GEOMETRY_BOX_H_

#include "examples/geometry/point.h"

namespace geometry {

// A Box holds its borders.
struct Box {
  Point low, high;
  bool Contains(Point p) const;
  bool Meets(const Box& o) const;
};

// Returns the smallest box that contains a and b.
Box Around(Point a, Point b);

}  // namespace geometry

#endif  // EXAMPLES_GEOMETRY_BOX_H_
