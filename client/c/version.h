// The version of the C library and of its package.
#ifndef MLA_CLIENT_C_VERSION_H_
#define MLA_CLIENT_C_VERSION_H_

namespace mla::capi {

// The library's soname carries the first number (BUILD.bazel): another one means that programs must
// be compiled again.
inline constexpr char kVersion[] = "0.2.0";

}  // namespace mla::capi

#endif  // MLA_CLIENT_C_VERSION_H_
