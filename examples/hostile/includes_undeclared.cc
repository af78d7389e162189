// SPDX-License-Identifier: Apache-2.0

#include "examples/hostile/undeclared.h"

int Declared() { return kUndeclared; }
