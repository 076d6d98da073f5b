// The only place that states the server's version.
#ifndef MLA_SERVER_PROCESS_VERSION_H_
#define MLA_SERVER_PROCESS_VERSION_H_

namespace mla::server {

inline constexpr char kVersion[] = "0.1.0";
inline constexpr char kApiVersion[] = "mla.v1";

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_VERSION_H_
