// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/compile.h"

namespace calc {
namespace {

constexpr const char* kNames[] = {
#include "examples/calc/opcode_names.inc"
};

Opcode OpcodeOf(char kind) {
  switch (kind) {
    case 'n':
      return kPush;
    case 'x':
      return kLoad;
    case '+':
      return kAdd;
    case '-':
      return kSubtract;
    case '*':
      return kMultiply;
    case '/':
      return kDivide;
    case '~':
      return kNegate;
    default:
      return kCall;
  }
}

void Append(const Node& node, Code* code) {
  for (const Tree& child : node.children) Append(*child, code);
  code->push_back({OpcodeOf(node.kind), node.number, node.function});
}

}  // namespace

Code Compile(const Node& node) {
  Code code;
  Append(node, &code);
  return code;
}

std::string Disassemble(const Code& code) {
  std::string text;
  for (const Instruction& i : code) text += std::string(text.empty() ? "" : " ") + kNames[i.opcode];
  return text;
}

}  // namespace calc
