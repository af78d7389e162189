// SPDX-License-Identifier: Apache-2.0

// Turns trees into code.
#ifndef EXAMPLES_CALC_COMPILE_H_
#define EXAMPLES_CALC_COMPILE_H_

#include <string>
#include <vector>

#include "examples/calc/ast.h"
#include "examples/calc/opcodes.h"

namespace calc {

// An Instruction works on a stack: its operands are on top, its result replaces them.
struct Instruction {
  Opcode opcode;
  double number = 0;  // of kPush
  int function = 0;   // of kCall
};

using Code = std::vector<Instruction>;

Code Compile(const Node& node);

// Returns the names of the instructions, with spaces between them.
std::string Disassemble(const Code& code);

}  // namespace calc

#endif  // EXAMPLES_CALC_COMPILE_H_
