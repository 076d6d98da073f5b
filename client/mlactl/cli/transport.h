// Names the transports of a client session as --transport does.
#ifndef MLA_CLIENT_MLACTL_CLI_TRANSPORT_H_
#define MLA_CLIENT_MLACTL_CLI_TRANSPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/mlactl/cli/program.h"

namespace mla::mlactl {

inline constexpr uint32_t kDefaultSpinMicros = 100;

// A ring over UCX, to a server that offers it; the second with puts, the third with puts into
// memory of the server's GPU.
inline constexpr char kUcx[] = "ucx";
inline constexpr char kUcxPuts[] = "ucx-puts";
inline constexpr char kUcxDevice[] = "ucx-device";

// inline, shm, ring-futex, ring-spin: without auto, which leaves the choice to the client library,
// and those over UCX, which few servers offer.
const std::vector<std::string>& TransportNames();

// Defines --transport with one name, auto included.
void AddTransport(Command* command, std::string* name);
// Defines --spin-us.
void AddSpin(Command* command, uint32_t* spin_us);

// `spin_us`: how long each side of ring-spin and ucx spins before it sleeps; unused by the others.
void SetTransport(const std::string& name, uint32_t spin_us, client::ClientOptions* options);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_CLI_TRANSPORT_H_
