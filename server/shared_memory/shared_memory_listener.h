// Listens on a unix socket through which clients on the same host, of the same user, get shared
// memory.
//
// A client connects, sends one wire::ConnectRequest, and receives one wire::ConnectReply with the
// descriptor of its region. Afterwards the connection carries nothing; it only shows that the
// client lives. When it ends, for any reason, the region's handle becomes invalid at once and its
// ring is closed, which aborts the ring's steps.
//
// Only processes of the server's own user, or root, are served (SO_PEERCRED, in addition to the
// socket file's mode). With server.socket_group, members of that group are served too. A client
// that does not send its ConnectRequest in time is dropped; so is one that sends anything after it.
//
// While regions are being closed, a request without room waits for their memory, at most
// SharedRegionTable::kCloseWait, whichever tenant the regions belong to. So a tenant at its own
// bound may be refused only after that time. Requests are tried in the order of arrival, waiting
// ones repeatedly, and none delays another.
//
// Connections without a request are bounded, in all and for each user (shm.handshakes_max,
// shm.user_handshakes), and so are requests that wait for room. A new connection beyond the bound
// displaces one that has not sent its request (unsent_connections.h); a request beyond the bound
// does not wait. So silent connections do not keep clients out.
//
// If the process has no descriptor left, connections are refused at once with a descriptor kept for
// that; without it the listener pauses. Once a second regions are checked: a client that has taken
// pages out of its region is disconnected.
//
// Other parts of the server may introduce connections, too, whose tenants they have authenticated.
//
// Threading: one thread serves all connections. Call Open and the destructor from one thread.
#ifndef MLA_SERVER_SHARED_MEMORY_SHARED_MEMORY_LISTENER_H_
#define MLA_SERVER_SHARED_MEMORY_SHARED_MEMORY_LISTENER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "server/attend/attend_message.h"
#include "server/config/config.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/command_ring.h"
#include "server/shared_memory/unsent_connections.h"

namespace mla::server {

struct SharedMemoryListenerOptions {
  scheduler::Engine* engine = nullptr;  // these four outlive the listener
  SharedRegionTable* regions = nullptr;
  Metrics* metrics = nullptr;
  std::shared_ptr<AttendMessagePool> pool;
  wire::ThreadTeam* team = nullptr;  // outlives the listener too; may be null
  Tracer* tracer = nullptr;          // outlives the listener; null: no spans
  uint64_t boot_id = 0;
  std::string path;          // of the socket
  std::string unix_tenant;   // server.unix_tenant
  bool open_folder = false;  // server.open_folder
  Config::Shm shm;
  size_t max_name_bytes = 128;  // of a tenant
  // False: only this process's user and root may connect. True: every user may connect whom the
  // permissions of the socket file admit; the caller sets these.
  bool any_user = false;
  // Returns the user at the other end of a connection; nullopt if unknown. Empty: asks the kernel
  // (SO_PEERCRED). Tests use this to play several users.
  std::function<std::optional<uid_t>(int descriptor)> user_of;
};

class SharedMemoryListener final {
 public:
  // UNAVAILABLE if the socket cannot be bound or another server uses it.
  static absl::StatusOr<std::unique_ptr<SharedMemoryListener>> Open(
      SharedMemoryListenerOptions options);
  // Ends every connection as if its client had gone.
  ~SharedMemoryListener();

  // Makes a connection of `tenant`, which the caller has authenticated, and returns its other end:
  // as if a client had connected to the socket. The tenant in its request is not read, and the
  // caller bounds the time until it is sent. Any thread. RESOURCE_EXHAUSTED: no descriptor is left.
  absl::StatusOr<int> ConnectFor(const std::string& tenant);

 private:
  struct Connection {
    int descriptor = -1;
    uid_t user = 0;
    int64_t since_ns = 0;
    int64_t connect_request_ns = 0;  // when connect_request came; 0: not yet
    wire::ConnectRequest connect_request{};
    std::string tenant;
    bool introduced = false;               // by ConnectFor, with its tenant
    std::shared_ptr<SharedRegion> region;  // null until the connect_reply
    std::unique_ptr<CommandRing> ring;
  };

  explicit SharedMemoryListener(SharedMemoryListenerOptions options);
  absl::Status Bind();
  void Run();
  void Accept();
  void TakeIntroduced();
  void MakeRoomFor(uid_t user);
  void NoteDisplaced(uid_t user);
  void NoteOutOfDescriptors();
  void RefuseConnection();
  void WatchListener(bool watch);
  int WaitMillis() const;
  void Handshake(Connection* connection);
  bool MayWait(const Connection& connection) const;
  bool Answer(Connection* connection);
  void AnswerWaiting();
  absl::Status Admit(const wire::ConnectRequest& connect_request, Connection* connection,
                     bool may_wait, wire::ConnectReply* connect_reply);
  absl::Status MakeRegion(const wire::ConnectRequest& connect_request, Connection* connection,
                          bool may_wait, wire::ConnectReply* connect_reply);
  absl::Status MakeRing(const wire::ConnectRequest& connect_request, Connection* connection,
                        wire::ConnectReply* connect_reply);
  void End(int descriptor);
  void Sweep();

  const SharedMemoryListenerOptions options_;
  struct Introduced {
    int descriptor;
    std::string tenant;
  };

  int listener_ = -1, events_ = -1, stop_event_ = -1;
  int introduced_event_ = -1;
  Mutex introduced_mutex_;
  std::vector<Introduced> introduced_ ABSL_GUARDED_BY(introduced_mutex_);  // by ConnectFor
  // A spare descriptor, to accept and refuse a connection when none is left.
  int spare_ = -1;
  bool exhausted_ = false;       // there was no descriptor for the last connection
  int64_t paused_until_ns_ = 0;  // until then the listening socket is not watched; 0: it is
  int64_t swept_ns_ = 0;
  std::map<int, Connection> connections_;  // by descriptor; used by the listener's thread only
  std::vector<int> waiting_;               // unanswered ones among connections_, by their request
  UnsentConnections unsent_;               // those without a request among connections_
  uint64_t displaced_unlogged_ = 0;
  int64_t displaced_logged_ns_ = 0;  // 0: never
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_SHARED_MEMORY_LISTENER_H_
