"""C++ libraries of contracts that stand by themselves."""

load("//third_party/precompiled:rules.bzl", "mla_library")

def grpc_cc_library(name, proto, has_service = True):
    """Messages and stubs of one contract, which imports no other.

    Args:
      name: of the library.
      proto: path of the contract in this package, without ".proto"; headers are included by it.
      has_service: False if it has messages alone, which need no stubs.
    """
    ends = ["pb", "grpc.pb"] if has_service else ["pb"]
    sources = ["%s.%s.cc" % (proto, end) for end in ends]
    headers = ["%s.%s.h" % (proto, end) for end in ends]
    native.genrule(
        name = name + "_sources",
        srcs = [proto + ".proto"],
        outs = sources + headers,
        cmd = "protoc -Iproto --cpp_out=$(RULEDIR)" +
              (" --grpc_out=$(RULEDIR) --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin" if has_service else "") +
              " $(SRCS)",
    )
    mla_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        copts = ["-Wno-unused-variable"],
        includes = ["."],
        deps = [
            "@system//:grpc++",
            "@system//:protobuf",
        ],
    )
