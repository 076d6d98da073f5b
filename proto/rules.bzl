"""C++ libraries of contracts that stand by themselves."""

STUBS = ["pb.h", "pb.cc", "grpc.pb.h", "grpc.pb.cc"]

def grpc_cc_library(name, proto):
    """Messages and stubs of one contract, which imports no other.

    Args:
      name: of the library.
      proto: path of the contract in this package, without ".proto"; headers are included by it.
    """
    native.genrule(
        name = name + "_sources",
        srcs = [proto + ".proto"],
        outs = [proto + "." + end for end in STUBS],
        cmd = "protoc -Iproto --cpp_out=$(RULEDIR) --grpc_out=$(RULEDIR)" +
              " --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin $(SRCS)",
    )
    native.cc_library(
        name = name,
        srcs = [proto + "." + end for end in STUBS if end.endswith("cc")],
        hdrs = [proto + "." + end for end in STUBS if end.endswith("h")],
        copts = ["-Wno-unused-variable"],
        includes = ["."],
        deps = [
            "@system//:grpc++",
            "@system//:protobuf",
        ],
    )
