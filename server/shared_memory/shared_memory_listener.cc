#include "server/shared_memory/shared_memory_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "server/grpc/identity.h"
#include "server/logging/logging.h"
#include "server/process/process_usage.h"
#include "server/process/socket_files.h"

namespace mla::server {
namespace {

constexpr int kSweepMillis = 1000;
constexpr int kPauseMillis = 100;  // pause of the listener if it cannot even refuse
constexpr int kRoomMillis = 10;    // how often it checks for room that a client waits for
constexpr int64_t kRoomNanos = std::chrono::nanoseconds(SharedRegionTable::kCloseWait).count();
// The kernel keeps this number of connections until they are accepted. Clients in that queue can
// send their requests already, so a long queue protects them from displacement.
constexpr int kBacklog = 128;
constexpr int64_t kDisplacedLogNanos = 10'000'000'000;  // between two lines about displacements

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

std::optional<uid_t> PeerUser(int descriptor) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

void WriteMessage(const absl::Status& status, wire::ConnectReply* connect_reply) {
  std::fill(std::begin(connect_reply->message), std::end(connect_reply->message), '\0');
  std::string(status.message()).copy(connect_reply->message, sizeof(connect_reply->message) - 1);
}

// Sends the reply together with the descriptors of the region and of its device memory, if there
// are any.
bool Send(int descriptor, const wire::ConnectReply& connect_reply, const SharedRegion* region) {
  iovec part{const_cast<wire::ConnectReply*>(&connect_reply), sizeof(connect_reply)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  int passed[2];
  size_t count = 0;
  if (region != nullptr) {
    passed[count++] = region->descriptor();
    const kernels::SharedDeviceMemory* const device = region->device();
    if (device != nullptr && device->exported().descriptor >= 0) {
      passed[count++] = device->exported().descriptor;
    }
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(passed))] = {};
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memcpy(CMSG_DATA(header), passed, count * sizeof(int));
  }
  return sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(connect_reply));
}

absl::Status NoDescriptor(int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no descriptor for a ring: ", std::strerror(error)));
}

}  // namespace

SharedMemoryListener::SharedMemoryListener(SharedMemoryListenerOptions options)
    : options_(std::move(options)),
      unsent_(static_cast<size_t>(options_.shm.handshakes_max),
              static_cast<size_t>(options_.shm.user_handshakes)) {}

absl::StatusOr<std::unique_ptr<SharedMemoryListener>> SharedMemoryListener::Open(
    SharedMemoryListenerOptions options) {
  std::unique_ptr<SharedMemoryListener> listener(new SharedMemoryListener(std::move(options)));
  MLA_RETURN_IF_ERROR(listener->Bind());
  listener->thread_ = std::thread([raw = listener.get()] { raw->Run(); });
  return listener;
}

absl::Status SharedMemoryListener::Bind() {
  const auto failed = [this](const char* what) {
    return absl::UnavailableError(
        absl::StrCat("shm.path ", options_.path, ": ", what, ": ", std::strerror(errno)));
  };
  const sockaddr_un address = Address(options_.path);
  if (options_.path.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(absl::StrCat("shm.path ", options_.path, ": got ",
                                               options_.path.size(), " bytes, at most ",
                                               sizeof(address.sun_path) - 1, " are possible"));
  }
  MLA_RETURN_IF_ERROR(PrepareSocketFolder("shm.path", options_.path, options_.open_folder));
  if (IsServed(options_.path, SOCK_SEQPACKET)) {
    return absl::UnavailableError(
        absl::StrCat("shm.path ", options_.path, ": another server is there"));
  }
  struct stat found {};
  if (lstat(options_.path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) {
    unlink(options_.path.c_str());
  }
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener < 0) return failed("socket");
  // The umask makes the file accessible to its owner only from the first moment.
  const mode_t before = umask(S_IRWXG | S_IRWXO | S_IXUSR);
  const int bound = bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  umask(before);
  if (bound != 0) {
    absl::Status status = failed("bind");
    close(listener);
    return status;
  }
  listener_ = listener;  // from here on this listener removes the socket file
  events_ = epoll_create1(EPOLL_CLOEXEC);
  stop_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  introduced_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  spare_ = OpenSpare();
  if (listen(listener_, kBacklog) != 0 || events_ < 0 || stop_event_ < 0 || introduced_event_ < 0) {
    return failed("listen");
  }
  for (const int descriptor : {listener_, stop_event_, introduced_event_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = descriptor;
    if (epoll_ctl(events_, EPOLL_CTL_ADD, descriptor, &event) != 0) return failed("epoll");
  }
  return absl::OkStatus();
}

SharedMemoryListener::~SharedMemoryListener() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(stop_event_, &one, sizeof(one)) == sizeof(one)) thread_.join();
  }
  if (listener_ >= 0) {
    unlink(options_.path.c_str());
    close(listener_);
  }
  if (events_ >= 0) close(events_);
  if (stop_event_ >= 0) close(stop_event_);
  if (introduced_event_ >= 0) close(introduced_event_);
  for (const Introduced& one : introduced_) close(one.descriptor);
  if (spare_ >= 0) close(spare_);
}

void SharedMemoryListener::Run() {
  bool stop = false;
  while (!stop) {
    epoll_event events[16];
    const int count = epoll_wait(events_, events, 16, WaitMillis());
    for (int i = 0; i < count; ++i) {
      const int descriptor = events[i].data.fd;
      if (descriptor == stop_event_) {
        stop = true;
      } else if (descriptor == listener_) {
        Accept();
      } else if (descriptor == introduced_event_) {
        TakeIntroduced();
      } else if (const auto entry = connections_.find(descriptor); entry != connections_.end()) {
        // Any event after the ConnectRequest ends the connection.
        if (entry->second.connect_request_ns == 0 && (events[i].events & EPOLLIN) != 0) {
          Handshake(&entry->second);
        } else {
          End(descriptor);
        }
      }
    }
    AnswerWaiting();
    Sweep();
    if (paused_until_ns_ != 0 && SteadyNanos() >= paused_until_ns_) WatchListener(true);
  }
  while (!connections_.empty()) End(connections_.begin()->first);
}

int SharedMemoryListener::WaitMillis() const {
  if (!waiting_.empty()) return kRoomMillis;
  return paused_until_ns_ != 0 ? kPauseMillis : kSweepMillis;
}

void SharedMemoryListener::WatchListener(bool watch) {
  epoll_event event{};
  if (watch) event.events = EPOLLIN;
  event.data.fd = listener_;
  epoll_ctl(events_, EPOLL_CTL_MOD, listener_, &event);
  paused_until_ns_ = watch ? 0 : SteadyNanos() + kPauseMillis * kNanosPerMilli;
}

void SharedMemoryListener::NoteOutOfDescriptors() {
  options_.metrics->wire().shm_refusals.fetch_add(1);
  if (!std::exchange(exhausted_, true)) {
    Log(LogLevel::kWarning, "shared_memory_out_of_descriptors", {{"path", options_.path}});
  }
}

// The connection stays in the listener's queue and would be reported again at once. A refused
// client uses gRPC instead; a waiting one would not.
void SharedMemoryListener::RefuseConnection() {
  NoteOutOfDescriptors();
  if (spare_ >= 0) {
    close(spare_);
    const int refused = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (refused >= 0) close(refused);
    spare_ = OpenSpare();
    if (refused >= 0) return;
  }
  if (spare_ < 0) spare_ = OpenSpare();
  WatchListener(false);
}

void SharedMemoryListener::Accept() {
  const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) {
    const bool exhausted =
        errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (exhausted) RefuseConnection();
    return;
  }
  if (InDescriptorReserve(descriptor)) {
    close(descriptor);
    NoteOutOfDescriptors();
    return;
  }
  exhausted_ = false;
  const std::optional<uid_t> user =
      options_.user_of ? options_.user_of(descriptor) : PeerUser(descriptor);
  const bool connect_reply =
      user.has_value() && (options_.any_user || *user == geteuid() || *user == 0);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.fd = descriptor;
  if (!connect_reply || epoll_ctl(events_, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    close(descriptor);
    return;
  }
  MakeRoomFor(*user);
  Connection& connection = connections_[descriptor];
  connection.descriptor = descriptor;
  connection.user = *user;
  connection.since_ns = SteadyNanos();
  unsent_.Add(descriptor, *user);
  Handshake(&connection);  // the request may have arrived already
}

// Makes room for a new connection of `user`, which has not sent its request yet.
void SharedMemoryListener::MakeRoomFor(uid_t user) {
  while (const auto displaced = unsent_.Displaced(user)) {
    // Its request may have come after the last check.
    Handshake(&connections_.at(displaced->descriptor));
    const auto found = connections_.find(displaced->descriptor);
    if (found == connections_.end() || found->second.connect_request_ns != 0) continue;
    End(displaced->descriptor);
    NoteDisplaced(displaced->user);
  }
}

void SharedMemoryListener::NoteDisplaced(uid_t user) {
  options_.metrics->wire().shm_displaced.fetch_add(1);
  ++displaced_unlogged_;
  const int64_t now = SteadyNanos();
  if (displaced_logged_ns_ != 0 && now - displaced_logged_ns_ < kDisplacedLogNanos) return;
  displaced_logged_ns_ = now;
  Log(LogLevel::kWarning, "shared_memory_displaced",
      {{"user", user}, {"connections", std::exchange(displaced_unlogged_, 0)}});
}

void SharedMemoryListener::Handshake(Connection* connection) {
  const int descriptor = connection->descriptor;
  wire::ConnectRequest& connect_request = connection->connect_request;
  const ssize_t got =
      recv(descriptor, &connect_request, sizeof(connect_request), MSG_DONTWAIT | MSG_TRUNC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got != static_cast<ssize_t>(sizeof(connect_request)) ||
      connect_request.magic != wire::kHandshakeMagic) {
    return End(descriptor);
  }
  unsent_.Remove(descriptor);
  connection->connect_request_ns = SteadyNanos();
  waiting_.push_back(descriptor);  // after earlier ones
}

// The number of requests that wait for room is bounded like that of connections without a request.
bool SharedMemoryListener::MayWait(const Connection& connection) const {
  const auto of_user = [this, &connection](int descriptor) {
    return connections_.at(descriptor).user == connection.user;
  };
  const auto waiting = std::count_if(waiting_.begin(), waiting_.end(), of_user);
  return waiting < options_.shm.user_handshakes &&
         waiting_.size() < static_cast<size_t>(options_.shm.handshakes_max);
}

// Returns false if there may be room soon.
bool SharedMemoryListener::Answer(Connection* connection) {
  const int descriptor = connection->descriptor;
  // Read before Create is called, so that a region that is closed in between is not missed.
  const bool room_to_come = options_.regions->closing();
  wire::ConnectReply connect_reply{};
  connect_reply.magic = wire::kHandshakeMagic;
  connect_reply.version = wire::kHandshakeVersion;
  connect_reply.boot_id = options_.boot_id;
  const bool may_wait = room_to_come &&
                        SteadyNanos() - connection->connect_request_ns < kRoomNanos &&
                        MayWait(*connection);
  const absl::Status status =
      Admit(connection->connect_request, connection, may_wait, &connect_reply);
  if (may_wait && absl::IsResourceExhausted(status)) return false;
  connect_reply.code = static_cast<int32_t>(status.code());
  if (!status.ok()) WriteMessage(status, &connect_reply);
  Log(LogLevel::kDebug, "shared_memory",
      {{"tenant", connection->tenant}, {"answer", status.ToString()}});
  const SharedRegion* const region = status.ok() ? connection->region.get() : nullptr;
  if (!Send(descriptor, connect_reply, region) || !status.ok()) End(descriptor);
  return true;
}

void SharedMemoryListener::AnswerWaiting() {
  const std::vector<int> waiting = std::exchange(waiting_, {});
  for (const int descriptor : waiting) {
    if (!Answer(&connections_.at(descriptor))) waiting_.push_back(descriptor);
  }
}

absl::Status SharedMemoryListener::Admit(const wire::ConnectRequest& connect_request,
                                         Connection* connection, bool may_wait,
                                         wire::ConnectReply* connect_reply) {
  if (connect_request.version != wire::kHandshakeVersion) {
    return absl::UnimplementedError(absl::StrCat("version: got ", connect_request.version,
                                                 ", must be ", wire::kHandshakeVersion));
  }
  if (!connection->introduced) {
    connection->tenant =
        UnixTenant(options_.unix_tenant,
                   std::string(connect_request.tenant,
                               strnlen(connect_request.tenant, sizeof(connect_request.tenant))));
  }
  if (!IsTenantName(connection->tenant, options_.max_name_bytes)) {
    return absl::InvalidArgumentError("tenant: must be printable ASCII characters");
  }
  MLA_RETURN_IF_ERROR(MakeRegion(connect_request, connection, may_wait, connect_reply));
  options_.metrics->wire().shared_regions.fetch_add(1);
  const SharedRegion& region = *connection->region;
  std::copy(region.handle().begin(), region.handle().end(), connect_reply->handle);
  connect_reply->region_bytes = region.size();
  connect_reply->arena_offset = region.arena_offset();
  if (region.device() != nullptr) connect_reply->flags |= wire::kHasDevice;
  const bool wants_ring = (connect_request.flags & wire::kWantRing) != 0;
  return wants_ring ? MakeRing(connect_request, connection, connect_reply) : absl::OkStatus();
}

// Without device memory if none is left: the client then sends its tensors another way.
absl::Status SharedMemoryListener::MakeRegion(const wire::ConnectRequest& connect_request,
                                              Connection* connection, bool may_wait,
                                              wire::ConnectReply* connect_reply) {
  const auto entries = static_cast<uint32_t>(options_.shm.ring_entries);
  const bool wants_ring = (connect_request.flags & wire::kWantRing) != 0;
  const uint64_t ring = wants_ring ? wire::RingBytes(entries) : 0;
  const auto make = [&](uint64_t front, const DeviceWish& device) {
    return options_.regions->Create(connection->tenant, connect_request.bytes, front,
                                    std::chrono::milliseconds(0), device);
  };
  if (wants_ring && (connect_request.flags & wire::kWantDevice) != 0 &&
      connect_request.device_mib > 0) {
    auto region = make(ring + wire::DevicePartBytes(entries),
                       {int64_t{connect_request.device_mib} << 20, static_cast<int32_t>(entries)});
    if (region.ok()) {
      connection->region = *std::move(region);
      return absl::OkStatus();
    }
    if (may_wait && absl::IsResourceExhausted(region.status())) return region.status();
    WriteMessage(region.status(), connect_reply);
  }
  MLA_ASSIGN_OR_RETURN(connection->region, make(ring, {}));
  return absl::OkStatus();
}

absl::Status SharedMemoryListener::MakeRing(const wire::ConnectRequest& connect_request,
                                            Connection* connection,
                                            wire::ConnectReply* connect_reply) {
  CommandRingOptions ring;
  ring.engine = options_.engine;
  ring.pool = options_.pool;
  ring.team = options_.team;
  ring.metrics = options_.metrics;
  ring.tracer = options_.tracer;
  ring.tenant = connection->tenant;
  // This ends the connection, and the end of the connection ends the ring.
  ring.on_disconnect = [descriptor = connection->descriptor] { shutdown(descriptor, SHUT_RDWR); };
  ring.boot_id = options_.boot_id;
  ring.entries = static_cast<uint32_t>(options_.shm.ring_entries);
  ring.spin_us = std::min(connect_request.spin_us, static_cast<uint32_t>(options_.shm.spin_us));
  ring.device_wait_ms = options_.shm.device_wait_ms;
  connect_reply->ring_entries = ring.entries;
  connect_reply->spin_us = ring.spin_us;
  connection->ring = std::make_unique<CommandRing>(std::move(ring), connection->region);
  return connection->ring->Start();
}

void SharedMemoryListener::End(int descriptor) {
  const auto entry = connections_.find(descriptor);
  Connection& connection = entry->second;
  std::erase(waiting_, descriptor);
  unsent_.Remove(descriptor);
  if (connection.region != nullptr) {
    options_.regions->Remove(*connection.region);
    options_.metrics->wire().shared_regions.fetch_sub(1);
  }
  connection.ring.reset();
  connections_.erase(entry);
  close(descriptor);
}

// Ends connections that did not send their request in time, or broke a rule of their region.
void SharedMemoryListener::Sweep() {
  const int64_t now = SteadyNanos();
  if (now - swept_ns_ < int64_t{kSweepMillis} * kNanosPerMilli) return;
  swept_ns_ = now;
  const int64_t longest = options_.shm.handshake_ms * kNanosPerMilli;
  std::vector<int> ending;
  for (const auto& [descriptor, connection] : connections_) {
    const bool unsent = connection.connect_request_ns == 0 && !connection.introduced;
    if (unsent && now - connection.since_ns > longest) {
      ending.push_back(descriptor);
    } else if (connection.region != nullptr && connection.region->HasHoles()) {
      options_.metrics->wire().regions_disconnected.fetch_add(1);
      Log(LogLevel::kWarning, "region_disconnected",
          {{"tenant", connection.tenant}, {"why", "holes"}});
      ending.push_back(descriptor);
    }
  }
  for (const int descriptor : ending) End(descriptor);
}

// -------------------------------------------------------------------------- Introduced connections

absl::StatusOr<int> SharedMemoryListener::ConnectFor(const std::string& tenant) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return NoDescriptor(errno);
  if (InDescriptorReserve(std::max(pair[0], pair[1]))) {
    for (const int descriptor : pair) close(descriptor);
    return NoDescriptor(EMFILE);
  }
  const MutexLock lock(introduced_mutex_);
  introduced_.push_back({pair[0], tenant});
  const uint64_t one = 1;
  if (write(introduced_event_, &one, sizeof(one)) < 0 && errno != EAGAIN) {
    return absl::InternalError(absl::StrCat("a ring's connection: ", std::strerror(errno)));
  }
  return pair[1];
}

void SharedMemoryListener::TakeIntroduced() {
  uint64_t count = 0;
  if (read(introduced_event_, &count, sizeof(count)) < 0) return;
  std::vector<Introduced> introduced;
  {
    const MutexLock lock(introduced_mutex_);
    introduced.swap(introduced_);
  }
  for (const Introduced& one : introduced) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = one.descriptor;
    if (epoll_ctl(events_, EPOLL_CTL_ADD, one.descriptor, &event) != 0) {
      close(one.descriptor);
      continue;
    }
    Connection& connection = connections_[one.descriptor];
    connection.descriptor = one.descriptor;
    connection.user = geteuid();
    connection.since_ns = SteadyNanos();
    connection.tenant = one.tenant;
    connection.introduced = true;
    Handshake(&connection);
  }
}

}  // namespace mla::server
