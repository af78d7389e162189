// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/parser.h"

#include "examples/calc/functions.h"
#include "examples/calc/lexer.h"

namespace calc {
namespace {

// Nesting is limited because each level takes a few stack frames.
constexpr int kMaxDepth = 1000;

class Parser {
 public:
  explicit Parser(std::string_view s) : rest_(s) { Next(); }

  Tree Whole(std::string* error) {
    Tree tree = Sum();
    if (tree != nullptr && token_.kind != 0) tree = Unexpected();
    *error = error_;
    return tree;
  }

 private:
  void Next() { token_ = TakeToken(&rest_); }

  Tree Fail(std::string error) {
    error_ = std::move(error);
    return nullptr;
  }

  Tree Unexpected() {
    return Fail(token_.kind == 0 ? "unexpected end" : "unexpected " + std::string(token_.text));
  }

  // Sum = Product { ("+" | "-") Product }
  Tree Sum() { return Chain('+', '-', &Parser::Product); }

  // Product = Unary { ("*" | "/") Unary }
  Tree Product() { return Chain('*', '/', &Parser::Unary); }

  Tree Chain(char one, char other, Tree (Parser::*operand)()) {
    Tree left = (this->*operand)();
    while (left != nullptr && (token_.kind == one || token_.kind == other)) {
      Tree both = std::make_unique<Node>();
      both->kind = token_.kind;
      Next();
      Tree right = (this->*operand)();
      if (right == nullptr) return nullptr;
      both->children.push_back(std::move(left));
      both->children.push_back(std::move(right));
      left = std::move(both);
    }
    return left;
  }

  // Unary = "-" Unary | number | "x" | name "(" Sum "," Sum ")" | "(" Sum ")"
  Tree Unary() {
    if (++depth_ > kMaxDepth) return Fail("too deeply nested");
    Tree tree = Primary();
    depth_--;
    return tree;
  }

  Tree Primary() {
    const Token token = token_;
    Tree tree = Number(token.number);
    switch (token.kind) {
      case 'n':
        Next();
        return tree;
      case '-':
        Next();
        tree->kind = '~';
        return Operand(tree.get(), 0) ? std::move(tree) : nullptr;
      case '(':
        Next();
        tree = Sum();
        return tree != nullptr && Take(')') ? std::move(tree) : nullptr;
      case 'a':
        Next();
        if (token.text == "x") {
          tree->kind = 'x';
          return tree;
        }
        tree->kind = 'f';
        tree->function = FindFunction(token.text);
        if (tree->function < 0) {
          return Fail("unknown name " + std::string(token.text) + ", did you mean " +
                      std::string(Suggest(token.text)) + "?");
        }
        return Operand(tree.get(), '(') && Operand(tree.get(), ',') && Take(')') ? std::move(tree) : nullptr;
      default:
        return Unexpected();
    }
  }

  // Takes the token before an operand of node and then the operand; 0 means no token (negation).
  bool Operand(Node* node, char before) {
    if (before != 0 && !Take(before)) return false;
    Tree operand = before == 0 ? Unary() : Sum();
    if (operand == nullptr) return false;
    node->children.push_back(std::move(operand));
    return true;
  }

  bool Take(char kind) {
    if (token_.kind != kind) return Unexpected() != nullptr;
    Next();
    return true;
  }

  std::string_view rest_;
  Token token_;
  std::string error_;
  int depth_ = 0;
};

}  // namespace

Tree Parse(std::string_view s, std::string* error) { return Parser(s).Whole(error); }

}  // namespace calc
