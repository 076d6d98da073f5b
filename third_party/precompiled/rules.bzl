"""cc_library, cc_test and cc_binary with the headers of other libraries compiled beforehand.

Two thirds of the time of a compilation go to the standard library, Abseil and GoogleTest, and in
folders that read the contract's messages half a second to the code that protoc generates. Under a
configuration that sets the define precompiled_headers (opt and what derives from it), every source
reads them in compiled form, except sources with an -O of their own that no header was compiled
with. The compiler refuses a header that was compiled with other flags (-Winvalid-pch is an error),
so FLAGS and .bazelrc cannot drift apart unnoticed.

Under these configurations the sources of tests are compiled by clang with -O0, in half of the time
that g++ takes (docs/internals/tests.md). Libraries and programs are always g++'s. A test of
tests/tidy holds the flags of both together.
"""

load(":objects.bzl", "CLANG", "CLANG_FLAGS", "PCH_FLAGS", "own_test_headers", "test_objects")

FOLDER = "third_party/precompiled"

# Packages, with those below them, most of whose sources read messages of the contract.
MESSAGE_READERS = [
    "client/c",
    "client/cpp",
    "client/mlactl",
    "server/attend",
    "server/connections",
    "server/control",
    "server/grpc",
    "server/hand_over",
    "server/lifecycle",
    "server/pages",
    "tests/bench/fleet",
    "tests/bench/wire",
    "tests/fuzz",
    "tests/integration",
    "tests/simulation/hand_over",
    "tests/simulation/simulator",
]

# Headers of this tree that most tests of a folder, with those below it, include: compiled, too.
OWN_TEST_HEADERS = {
    "scheduler/engine_tests": "//scheduler/testing:engine_test_headers",
    "tests/fake_hip": "//tests/fake_hip:backend_test_headers",
    "tests/integration": "//tests/integration:server_test_headers",
}

# The flags of build:opt in .bazelrc, and of Bazel's toolchain.
FLAGS = " ".join([
    "-std=c++20",
    "-fPIC",
    "-g0",
    "-DNDEBUG",
    "-fno-omit-frame-pointer",
    "-fno-canonical-system-headers",
    "-ffunction-sections",
    "-fdata-sections",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
])

def precompiled_header(name, srcs, optimization, generated = []):
    """Compiles the headers that srcs include.

    Args:
      name: the header is compiled/NAME.h, the compiled one next to it; a library NAME holds both.
      srcs: texts of #include lines, put together in their order.
      optimization: of the sources that read the header; the compiler crashes with another one.
      generated: headers among the included ones that protoc makes.
    """
    header = "compiled/" + name + ".h"
    native.genrule(
        name = name + "_compiled",
        srcs = srcs + generated,
        outs = [header, header + ".gch"],
        cmd = "cat %s >$(location %s) && " % (" ".join(["$(location %s)" % src for src in srcs]), header) +
              "g++ %s %s -isystem $(GENDIR)/proto -x c++-header $(location %s) -o $(location %s.gch)" %
              (FLAGS, optimization, header, header),
    )
    native.cc_library(
        name = name,
        hdrs = select({
            ":enabled": [header, header + ".gch"] + generated,
            "//conditions:default": [],
        }),
    )

def precompiled_test_header(name, srcs, generated = []):
    """Compiles the headers that srcs include with clang, as test_objects reads them.

    Args:
      name: the header is compiled/NAME.h; a group of files NAME holds it and the compiled one.
      srcs: texts of #include lines, put together in their order.
      generated: headers among the included ones that protoc makes.
    """
    header = "compiled/" + name + ".h"
    compiled = "compiled/" + name + ".pch"

    # As for headers of this tree, paths of /proc/self/cwd are the same in all clones.
    native.genrule(
        name = name + "_compiled",
        srcs = srcs + generated,
        outs = [header, compiled],
        cmd = "cat %s >$(location %s) && " % (" ".join(["$(location %s)" % src for src in srcs]), header) +
              "%s %s -isystem /proc/self/cwd/$(GENDIR)/proto -x c++-header " % (CLANG, " ".join(CLANG_FLAGS)) +
              " ".join(PCH_FLAGS) + " " +
              "/proc/self/cwd/$(location %s) -o $(location %s)" % (header, compiled),
    )
    native.filegroup(
        name = name,
        srcs = [header, compiled] + generated,
    )

def _reads_messages():
    package = native.package_name() + "/"
    for reader in MESSAGE_READERS:
        if package.startswith(reader + "/"):
            return True
    return False

def _library_test_headers():
    kind = "clang_test" + ("_with_messages" if _reads_messages() else "")
    return "//third_party/precompiled:" + kind

def _test_headers():
    """The headers that clang reads in compiled form in a test of this package."""
    package = native.package_name() + "/"
    for folder, headers in OWN_TEST_HEADERS.items():
        if package.startswith(folder + "/"):
            return headers
    return _library_test_headers()

def precompiled_own_test_headers(name, includes, deps):
    """Compiles headers of this tree for OWN_TEST_HEADERS.

    Args:
      name: a name in OWN_TEST_HEADERS.
      includes: paths of headers.
      deps: the libraries of these headers.
    """
    own_test_headers(
        name = name,
        testonly = True,
        includes = includes,
        deps = deps,
        precompiled = _library_test_headers(),
        tags = ["manual"],  # part of no other configuration
        visibility = ["//%s:__subpackages__" % folder for folder, headers in OWN_TEST_HEADERS.items()
                      if headers == "//%s:%s" % (native.package_name(), name)],
    )

def _reading(kind, copts, deps):
    """The attributes of a rule whose sources read the compiled header."""
    for copt in copts:
        if copt == "-O2":
            kind = "library"
        elif copt.startswith("-O"):
            return {"copts": copts, "deps": deps}
    if kind == "test":
        copts = ["-O1"] + copts
    if _reads_messages():
        kind += "_with_messages"
    header = "$(GENDIR)/%s/compiled/%s.h" % (FOLDER, kind)
    return {
        "copts": copts + select({
            "//third_party/precompiled:enabled": ["-Winvalid-pch", "-include", header],
            "//conditions:default": [],
        }),
        "deps": deps + ["//third_party/precompiled:" + kind],
    }

def mla_library(copts = [], deps = [], **kwargs):
    """A cc_library. Programs are linked from its objects, so its shared object is not made."""
    native.cc_library(**dict(kwargs, linkstatic = True, **_reading("library", copts, deps)))

def mla_binary(copts = [], deps = [], **kwargs):
    """A cc_binary."""
    native.cc_binary(**dict(kwargs, **_reading("library", copts, deps)))

def mla_test(name, srcs, size = "small", copts = [], deps = [], **kwargs):
    """A cc_test of GoogleTest: most take longer to compile than to run.

    Clang compiles its sources without optimisation where headers are compiled beforehand. g++
    compiles those of a test with copts, for example one that computes itself and has ["-O1"], and
    all sources in other configurations.
    """
    attributes = _reading("test", copts, deps)
    if copts:
        native.cc_test(name = name, srcs = srcs, size = size, **dict(kwargs, **attributes))
        return
    objects = name + "_objects"
    test_objects(
        name = objects,
        testonly = True,
        srcs = [src for src in srcs if src.endswith(".cc")],
        headers = [src for src in srcs if not src.endswith(".cc")],
        deps = deps,
        precompiled = _test_headers(),
        tags = ["manual"],  # part of no other configuration
    )
    native.cc_test(
        name = name,
        size = size,
        srcs = select({
            "//third_party/precompiled:enabled": [objects],
            "//conditions:default": srcs,
        }),
        **dict(kwargs, **attributes)
    )
