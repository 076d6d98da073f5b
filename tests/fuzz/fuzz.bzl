"""A fuzz target: a test with the harness's driver, and a binary with libFuzzer for ./dev fuzz."""

load("//third_party/precompiled:rules.bzl", "mla_library")

def fuzz_target(name, src, deps, size = "small"):
    """Defines the test NAME_fuzz_test and the binary NAME_fuzz.

    Args:
      name: what ./dev fuzz calls it.
      src: defines LLVMFuzzerTestOneInput and TargetUnderTest.
      deps: what src needs.
      size: of the test.
    """
    mla_library(
        name = name + "_target",
        testonly = True,
        srcs = [src],
        deps = deps + ["//tests/fuzz/harness:target"],
        alwayslink = True,
    )
    native.cc_test(
        name = name + "_fuzz_test",
        size = size,
        deps = [
            name + "_target",
            "//tests/fuzz/harness:driver",
        ],
    )
    native.cc_binary(
        name = name + "_fuzz",
        testonly = True,
        tags = ["manual"],
        deps = [
            name + "_target",
            "//tests/fuzz/harness:libfuzzer_seeds",
        ],
    )
