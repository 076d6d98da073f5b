// A client with a foreign server: regions that are not sealed, sized or laid out as agreed are
// refused before an access to them could end the client.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/shared_memory/socket_owner.h"
#include "proto/wire/ring_layout.h"
#include "tests/integration/test_server.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::CheckSocketFile;
using client::CheckSocketPeer;
using client::SharedMemory;
using client::TrustedUsers;

constexpr uint32_t kEntries = 16;
constexpr uint64_t kArenaBytes = 65536;

// The offer of a server, for tests to falsify.
struct Offer {
  wire::ConnectReply connect_reply{};
  uint64_t memory_bytes = wire::RingBytes(kEntries) + kArenaBytes;
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  bool with_memory = true;
  wire::RingHeader header{};
};

Offer GoodOffer() {
  Offer offer;
  offer.connect_reply.magic = offer.header.magic = wire::kHandshakeMagic;
  offer.connect_reply.version = wire::kHandshakeVersion;
  offer.connect_reply.ring_entries = offer.header.entries = kEntries;
  offer.connect_reply.region_bytes = offer.memory_bytes;
  offer.connect_reply.arena_offset = wire::RingBytes(kEntries);
  offer.header.submissions_offset = wire::SubmissionsOffset();
  offer.header.completions_offset = wire::CompletionsOffset(kEntries);
  offer.header.replies_offset = wire::RepliesOffset(kEntries);
  return offer;
}

void Send(int connection, const Offer& offer) {
  const int memory = memfd_create("offer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(memory, static_cast<off_t>(offer.memory_bytes)), 0);
  if (offer.memory_bytes >= sizeof(offer.header)) {
    ASSERT_EQ(pwrite(memory, &offer.header, sizeof(offer.header), 0),
              static_cast<ssize_t>(sizeof(offer.header)));
  }
  if (offer.seals != 0) {
    ASSERT_EQ(fcntl(memory, F_ADD_SEALS, offer.seals), 0);
  }
  iovec part{const_cast<wire::ConnectReply*>(&offer.connect_reply), sizeof(offer.connect_reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (offer.with_memory) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const first = CMSG_FIRSTHDR(&message);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(first), &memory, sizeof(memory));
  }
  EXPECT_EQ(sendmsg(connection, &message, MSG_NOSIGNAL),
            static_cast<ssize_t>(sizeof(offer.connect_reply)));
  close(memory);
}

// Connects to a server that makes `offer`.
absl::Status ConnectTo(const Offer& offer) {
  const TempFolder folder;
  const std::string path = folder.File("s");
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  std::thread server([&] {
    const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    wire::ConnectRequest request;
    EXPECT_EQ(recv(connection, &request, sizeof(request), 0),
              static_cast<ssize_t>(sizeof(request)));
    Send(connection, offer);
    recv(connection, &request, sizeof(request), 0);  // until the client has gone
    close(connection);
  });
  client::SharedMemoryOptions options;
  options.bytes = kArenaBytes;
  absl::Status status;
  {
    const auto memory = SharedMemory::Connect(path, options);
    status = memory.status();
    if (memory.ok()) std::memset((*memory)->region().data(), 1, (*memory)->region().size());
  }
  server.join();
  close(listener);
  return status;
}

// A listener of the shared-memory protocol that a test serves by hand.
class Listener {
 public:
  explicit Listener(int backlog) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_, backlog), 0);
  }
  ~Listener() { Close(); }
  void Close() {
    if (socket_ >= 0) close(std::exchange(socket_, -1));
  }
  // Connects without waiting; returns -1 if the queue is full.
  int TryConnect() const {
    const int one = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (connect(one, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return one;
    close(one);
    return -1;
  }
  int socket() const { return socket_; }
  const std::string& path() const { return path_; }

 private:
  const TempFolder folder_;
  const std::string path_ = folder_.File("s");
  int socket_ = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
};

TEST(HostileServerTest, AListenerThatAcceptsNothingIsGivenUp) {
  Listener listener(/*backlog=*/0);
  std::vector<int> queued;
  for (int one = listener.TryConnect(); one >= 0; one = listener.TryConnect()) {
    queued.push_back(one);
  }
  ASSERT_FALSE(queued.empty());
  auto connecting = std::async(std::launch::async, [&listener] {
    client::SharedMemoryOptions options;
    options.connect_timeout_ms = 50;
    return SharedMemory::Connect(listener.path(), options).status();
  });
  EXPECT_EQ(connecting.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  listener.Close();  // ends a client that waits for it
  const absl::Status status = connecting.get();
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("does not accept connections in time"), std::string::npos)
      << status;
  for (const int one : queued) close(one);
}

// A server with too many connections closes some before it reads their requests.
TEST(HostileServerTest, AConnectionThatIsClosedWithoutAReplyIsTriedAgain) {
  const Listener listener(/*backlog=*/8);
  std::thread server([&listener] {
    for (int i = 0; i < 2; ++i) close(accept4(listener.socket(), nullptr, nullptr, SOCK_CLOEXEC));
    const int connection = accept4(listener.socket(), nullptr, nullptr, SOCK_CLOEXEC);
    wire::ConnectRequest request;
    EXPECT_EQ(recv(connection, &request, sizeof(request), 0),
              static_cast<ssize_t>(sizeof(request)));
    Send(connection, GoodOffer());
    recv(connection, &request, sizeof(request), 0);  // until the client has gone
    close(connection);
  });
  client::SharedMemoryOptions options;
  options.bytes = kArenaBytes;
  EXPECT_EQ(SharedMemory::Connect(listener.path(), options).status(), absl::OkStatus());
  server.join();
}

TEST(HostileServerTest, AServerThatClosesEveryConnectionIsGivenUp) {
  Listener listener(/*backlog=*/8);
  std::atomic<int> closed{0};
  std::thread server([&] {
    for (int one; (one = accept4(listener.socket(), nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      close(one);
      ++closed;
    }
  });
  EXPECT_EQ(SharedMemory::Connect(listener.path(), {}).status().code(), StatusCode::kUnavailable);
  shutdown(listener.socket(), SHUT_RDWR);
  server.join();
  EXPECT_GT(closed, 1);
  EXPECT_LT(closed, 20);
}

TEST(HostileServerTest, AGoodOfferIsTaken) { EXPECT_EQ(ConnectTo(GoodOffer()), absl::OkStatus()); }

TEST(HostileServerTest, RegionsThatAreNotAsAgreedAreRefused) {
  const std::pair<const char*, std::function<void(Offer&)>> kFaults[] = {
      {"region", [](Offer& o) { o.with_memory = false; }},
      {"region", [](Offer& o) { o.seals = 0; }},
      {"region", [](Offer& o) { o.seals = F_SEAL_SHRINK; }},
      {"region", [](Offer& o) { o.seals = F_SEAL_GROW; }},
      {"region_bytes", [](Offer& o) { o.memory_bytes -= 4096; }},
      {"region_bytes", [](Offer& o) { o.memory_bytes = 0; }},
      {"region_bytes", [](Offer& o) { o.connect_reply.region_bytes = uint64_t{1} << 40; }},
      {"region_bytes", [](Offer& o) { o.connect_reply.region_bytes = o.memory_bytes -= 4096; }},
      {"ring_entries", [](Offer& o) { o.connect_reply.ring_entries = 0; }},
      {"ring_entries", [](Offer& o) { o.connect_reply.ring_entries = 15; }},
      {"ring_entries", [](Offer& o) { o.connect_reply.ring_entries = 1u << 31; }},
      {"arena_offset", [](Offer& o) { o.connect_reply.ring_entries = 2 * kEntries; }},
      {"arena_offset", [](Offer& o) { o.connect_reply.arena_offset = o.memory_bytes + 64; }},
      {"arena_offset", [](Offer& o) { o.connect_reply.arena_offset = 0; }},
      {"magic", [](Offer& o) { o.header.magic ^= 1; }},
      {"entries", [](Offer& o) { o.header.entries = 32; }},
      {"submissions_offset", [](Offer& o) { o.header.submissions_offset += 64; }},
      {"completions_offset", [](Offer& o) { o.header.completions_offset = uint64_t{1} << 50; }},
      {"replies_offset", [](Offer& o) { o.header.replies_offset = 0; }},
  };
  int number = 0;
  for (const auto& [field, spoil] : kFaults) {
    Offer offer = GoodOffer();
    spoil(offer);
    const absl::Status status = ConnectTo(offer);
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << field << " " << number;
    EXPECT_NE(status.message().find(std::string(": ") + field + ": "), std::string::npos)
        << number << " " << status;
    ++number;
  }
}

TEST(HostileServerTest, ClientsRefuseSocketsOfOthersWhereAnyUserCouldHavePutThem) {
  const TempFolder folder;
  const std::string path = folder.File("s");
  const TrustedUsers stranger = {geteuid() + 1, -1}, told = {geteuid() + 1, geteuid()};
  EXPECT_EQ(CheckSocketFile(path, stranger), absl::OkStatus());  // no file exists
  ASSERT_EQ(mknod(path.c_str(), S_IFSOCK | 0600, 0), 0);
  const bool root = geteuid() == 0;                              // root is always trusted
  EXPECT_EQ(CheckSocketFile(path, stranger), absl::OkStatus());  // only its owner may write here
  ASSERT_EQ(chmod(folder.path().c_str(), 01777), 0);
  EXPECT_EQ(absl::IsPermissionDenied(CheckSocketFile(path, stranger)), !root);
  EXPECT_EQ(CheckSocketFile(path, told), absl::OkStatus());
  EXPECT_EQ(CheckSocketFile(path, {geteuid(), -1}), absl::OkStatus());
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
  EXPECT_EQ(absl::IsPermissionDenied(CheckSocketPeer(pair[0], path, stranger)), !root);
  EXPECT_EQ(CheckSocketPeer(pair[0], path, told), absl::OkStatus());
  close(pair[0]);
  close(pair[1]);
  if (!root) return;
  ASSERT_EQ(lchown(path.c_str(), 12345, -1), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(CheckSocketFile(path, {0, -1})));
  EXPECT_EQ(CheckSocketFile(path, {0, 12345}), absl::OkStatus());
}

// Both kinds of connection check the socket before they send anything.
TEST(HostileServerTest, NothingIsSentToASocketOfAnother) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act for another user";
  constexpr int kOther = 12345;
  const TestServer server;
  ASSERT_EQ(chmod(server.folder().path().c_str(), 01777), 0);
  ASSERT_EQ(lchown(server.folder().File("mla.sock").c_str(), kOther, -1), 0);
  client::ClientOptions options;
  const absl::Status refused = client::Client::Connect(server.unix_target(), options).status();
  EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
  options.server_uid = kOther;
  EXPECT_EQ(client::Client::Connect(server.unix_target(), options).status(), absl::OkStatus());

  const std::string path = server.folder().File("s");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  int listens[2];
  ASSERT_EQ(pipe(listens), 0);
  const pid_t child = fork();
  if (child == 0) {
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    const bool made = setgid(kOther) == 0 && setuid(kOther) == 0 &&
                      bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                      listen(listener, 1) == 0;
    if (!made || write(listens[1], "1", 1) != 1) _exit(1);
    while (true) pause();
  }
  close(listens[1]);
  char byte = 0;
  EXPECT_EQ(read(listens[0], &byte, 1), 1);
  close(listens[0]);
  client::SharedMemoryOptions shared;
  shared.bytes = kArenaBytes;
  shared.connect_timeout_ms = 100;
  const absl::Status peer = SharedMemory::Connect(path, shared).status();
  EXPECT_TRUE(absl::IsPermissionDenied(peer)) << peer;
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace mla::integration
