#include "client/mlactl/fleet/servers.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/status_macros.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {
namespace {

// At most this number of servers is asked at the same time.
constexpr size_t kMostAtOnce = 16;

}  // namespace

absl::StatusOr<Members> ReadMembers(const CommonOptions& common, const client::EtcdFiles& etcd) {
  MLA_ASSIGN_OR_RETURN(const auto registry, client::RegistryOf(common.target, etcd));
  return registry->Read();
}

absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const CommonOptions& common,
                                                          const std::string& address) {
  CommonOptions one = common;
  one.target = address;
  one.client.transport = client::ClientOptions::Transport::kInline;
  return Connect(one);
}

void ForEach(size_t count, const std::function<void(size_t place)>& act) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < std::min(kMostAtOnce, count); ++i) {
    threads.emplace_back([&] {
      for (size_t place = next++; place < count; place = next++) act(place);
    });
  }
  for (std::thread& one : threads) one.join();
}

}  // namespace mla::mlactl
