// The C++ client when its environment fails: a connection that takes no more bytes, and a machine
// that has no more threads.
#include <dlfcn.h>
#include <errno.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/wire/thread_team.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace {

thread_local int threads_left = INT_MAX;

}  // namespace

// Replaces the C library's function, so that threads of the test can run out of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left == 0) return EAGAIN;
  --threads_left;
  return real(thread, attributes, start, argument);
}

namespace mla::integration {
namespace {

using namespace std::chrono_literals;

constexpr std::byte kBefore{0x11}, kAfter{0xee};

int UnixSocket(const std::string& path, bool listening) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const auto* const name = reinterpret_cast<const sockaddr*>(&address);
  const int result = listening ? bind(fd, name, sizeof(address)) + listen(fd, 8)
                               : connect(fd, name, sizeof(address));
  EXPECT_EQ(result, 0);
  return fd;
}

// Relays connections to a server, and can stop taking bytes from the client.
class Relay final {
 public:
  Relay(const std::string& path, const std::string& server_path)
      : server_path_(server_path), listener_(UnixSocket(path, true)), thread_([this] { Run(); }) {}
  ~Relay() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  void Stop() { taking_ = false; }
  void GoOn() { taking_ = true; }
  // Returns how many of the client's bytes since GoOn had this value.
  int64_t Seen(std::byte value) const { return seen_[static_cast<size_t>(value)].load(); }

 private:
  bool Carry(int from, int to, bool count) {
    char buffer[65536];
    const ssize_t got = recv(from, buffer, sizeof(buffer), 0);
    if (got <= 0) return false;
    for (ssize_t i = 0; count && i < got; ++i) ++seen_[static_cast<uint8_t>(buffer[i])];
    for (ssize_t sent = 0; sent < got;) {
      const ssize_t more = send(to, buffer + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
      if (more <= 0) return false;
      sent += more;
    }
    return true;
  }

  void Run() {
    std::vector<std::pair<int, int>> open;  // client and server sockets
    bool stopped = false;
    while (!stop_) {
      stopped |= !taking_;
      std::vector<pollfd> ends = {{listener_, POLLIN, 0}};
      for (const auto& [client, server] : open) {
        ends.push_back({taking_ ? client : -1, POLLIN, 0});
        ends.push_back({server, POLLIN, 0});
      }
      poll(ends.data(), ends.size(), 10);
      for (size_t i = open.size(); i-- > 0;) {
        const auto [client, server] = open[i];
        bool goes_on = true;
        if (ends[2 * i + 1].revents != 0) goes_on = Carry(client, server, stopped);
        if (goes_on && ends[2 * i + 2].revents != 0) goes_on = Carry(server, client, false);
        if (goes_on) continue;
        close(client);
        close(server);
        open.erase(open.begin() + static_cast<ptrdiff_t>(i));
      }
      if (ends[0].revents != 0) {
        const int client = accept(listener_, nullptr, nullptr);
        open.emplace_back(client, UnixSocket(server_path_, false));
      }
    }
    for (const auto& [client, server] : open) {
      close(client);
      close(server);
    }
  }

  const std::string server_path_;
  const int listener_;
  std::atomic<bool> stop_{false}, taking_{true};
  std::atomic<int64_t> seen_[256] = {};
  std::thread thread_;
};

client::AttendCall CallOf(const Dims& dims, uint32_t rows, std::vector<std::byte>* q,
                          std::vector<std::byte>* o) {
  client::AttendCall call;
  call.row_count = rows;
  call.num_heads = static_cast<uint32_t>(dims.heads);
  call.profile = v1::PROFILE_ABSORBED;
  call.q_dtype = v1::DTYPE_F32;
  const size_t row_heads = size_t{rows} * static_cast<size_t>(dims.heads);
  q->assign(row_heads * static_cast<size_t>(dims.row()) * 4, kBefore);
  o->assign(row_heads * static_cast<size_t>(dims.lora) * 2, std::byte{});
  call.q = q->data();
  call.o = o->data();
  return call;
}

// Changes that the caller makes to its tensors after Wait must not reach the server.
TEST(StalledWireTest, TensorsAreReadNoMoreWhenWaitHasReturned) {
  const TestServer server;
  const std::string path = server.folder().File("relay.sock");
  Relay relay(path, server.folder().File("mla.sock"));
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  options.request_timeout_ms = 1000;
  options.renew_leases = false;
  auto client = client::Client::Connect("unix:" + path, options);
  ASSERT_TRUE(client.ok()) << client.status();
  {
    Worker worker(client->get(), {}, "m", 1);
    Track track = *worker.Open();
    auto step = worker.session().Begin("m", {{&track.sequence, 1024}});
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<std::byte> q, o;
    const client::AttendCall call = CallOf(worker.dims(), 1024, &q, &o);
    relay.Stop();
    std::thread later([&] {
      std::this_thread::sleep_for(2s);
      relay.GoOn();
    });
    EXPECT_EQ((*step)->Attend(call).status().code(), absl::StatusCode::kDeadlineExceeded);
    std::memset(q.data(), static_cast<int>(kAfter), q.size());
    later.join();
    track.sequence.Detach();
  }
  // A session on the same connection: its call leaves after all earlier bytes.
  auto sequence = *(*client)->OpenSequence("m");
  const auto session = *(*client)->OpenSession();
  const auto step = session->Begin("m", {{&sequence, 1}});
  EXPECT_TRUE(step.ok()) << step.status();
  EXPECT_GE(relay.Seen(kBefore), 100000);  // the connection was full of these bytes
  EXPECT_LT(relay.Seen(kAfter), 1000);
}

TEST(StalledWireTest, WithoutMoreThreadsRequestsWaitForTheirWaiters) {
  const TestServer server;
  client::ClientOptions options;
  options.transport = client::ClientOptions::Transport::kInline;
  const auto client = server.Connect(options);
  Worker worker(client.get(), {}, "m", 1);
  Track track = *worker.Open();
  auto step = worker.session().Begin("m", {{&track.sequence, 2}});
  ASSERT_TRUE(step.ok()) << step.status();
  std::vector<std::byte> kv(2 * static_cast<size_t>(worker.dims().row()) * 4), q, o;
  client::AttendCall call = CallOf(worker.dims(), 2, &q, &o);
  call.kv = kv.data();
  threads_left = 0;
  std::vector<client::PendingAttend> pending;
  for (int layer = 0; layer < worker.dims().layers; ++layer) {
    call.layer = static_cast<uint32_t>(layer);
    pending.push_back((*step)->AttendAsync(call));
  }
  threads_left = INT_MAX;
  for (client::PendingAttend& one : pending) EXPECT_TRUE(one.Wait().ok());
  EXPECT_TRUE((*step)->End().ok());
}

TEST(StalledWireTest, WithoutMoreThreadsConnectSaysSo) {
  const TestServer server;
  const auto first = server.Connect();  // gRPC's threads exist by now
  threads_left = 0;
  const auto second = client::Client::Connect(server.unix_target(), {});
  threads_left = INT_MAX;
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(StalledWireTest, CopiesAreMadeByThoseThreadsThatThereAre) {
  for (const int helpers : {0, 1, 2}) {
    threads_left = helpers;
    wire::ThreadTeam team({4, 0});
    threads_left = INT_MAX;
    EXPECT_EQ(team.threads(), helpers + 1);
    std::vector<std::byte> from(2 * wire::ThreadTeam::kSharedBytes, kBefore), to(from.size());
    team.Copy(from, to.data());
    EXPECT_EQ(to, from) << helpers;
  }
}

TEST(StalledWireTest, WithoutMoreThreadsSessionsCopyThemselves) {
  using Transport = client::ClientOptions::Transport;
  const TestServer server;
  for (const Transport transport : {Transport::kShm, Transport::kRing}) {
    client::ClientOptions options;
    options.transport = transport;
    options.copy_threads = 1000;
    const auto client = server.Connect(options);
    Dims dims;
    dims.heads = 16;
    dims.layers = 1;
    threads_left = 0;
    Worker worker(client.get(), dims, "m", 1);
    threads_left = INT_MAX;
    EXPECT_EQ(worker.session().transport(), transport == Transport::kRing ? "ring" : "shm");
    std::deque<Track> tracks;
    std::vector<Track*> each;
    for (int i = 0; i < 30; ++i) each.push_back(&tracks.emplace_back(*worker.Open()));
    const std::vector<uint32_t> rows(each.size(), 15);
    EXPECT_EQ(worker.Step(each, rows, v1::PROFILE_ABSORBED, {}, v1::DTYPE_BF16), absl::OkStatus());
    EXPECT_EQ(worker.most_messages(), 1u);
  }
}

}  // namespace
}  // namespace mla::integration
