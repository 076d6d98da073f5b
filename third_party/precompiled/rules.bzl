"""cc_library, cc_test and cc_binary with the headers of other libraries compiled beforehand.

Two thirds of the time of a compilation go to the standard library, Abseil and GoogleTest, and in
folders that read the contract's messages half a second to the code that protoc generates. Under a
configuration that sets the define precompiled_headers (opt and what derives from it), every source
reads them in compiled form, except sources with an -O of their own that no header was compiled
with. The compiler refuses a header that was compiled with other flags (-Winvalid-pch is an error),
so FLAGS and .bazelrc cannot drift apart unnoticed.
"""

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

def _reads_messages():
    package = native.package_name() + "/"
    for reader in MESSAGE_READERS:
        if package.startswith(reader + "/"):
            return True
    return False

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

def mla_test(size = "small", copts = [], deps = [], **kwargs):
    """A cc_test of GoogleTest, compiled with -O1: most take longer to compile than to run."""
    native.cc_test(size = size, **dict(kwargs, **_reading("test", copts, deps)))
