# SPDX-License-Identifier: Apache-2.0

"""A unit is one idea in three files: NAME.h, NAME.cc and NAME_test.cc."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

def unit(name, deps = [], header_only = False, tested = True, **kwargs):
    """Declares the library NAME and, unless tested is False, its test NAME_test.

    Args:
      name: of the library, and of its files.
      deps: the libraries that both library and test use.
      header_only: there is no NAME.cc.
      tested: there is a NAME_test.cc.
      **kwargs: of cc_library.
    """
    cc_library(
        name = name,
        srcs = [] if header_only else [name + ".cc"],
        hdrs = [name + ".h"],
        visibility = ["//examples:__subpackages__"],
        deps = deps,
        **kwargs
    )
    if tested:
        cc_test(
            name = name + "_test",
            size = "small",
            srcs = [name + "_test.cc"],
            deps = deps + [":" + name, "//examples/check"],
        )
